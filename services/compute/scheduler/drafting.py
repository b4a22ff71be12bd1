"""Drafting: how many of the device's guesses each row gets, and what their results mean.

A plan is made before it is known how many drafts of the step before were right. So it counts all of
them as scheduled, which is what pages are taken for, and the device knows better; with the result
the count comes down.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.packing import Packer
from services.compute.scheduler.sequence import LaunchedStep, Sequence
from services.compute.scheduler.state import SchedulerState
from services.compute.speculative.draft_counts import GRAMMAR, PREDICTION, SUFFIX, DraftCounts
from services.compute.step import (
    DEVICE_TOKEN,
    NO_DRAFTS,
    NO_IDS,
    ForcedTokens,
    Int32Array,
    SlotDelta,
    StepResult,
    int32_array,
)


class DraftPolicy(Protocol):
    """Chooses numbers of drafts by slot; `speculative.controller` says what its calls mean."""

    def begin(self, slot: int) -> None: ...

    def rests(self) -> bool: ...

    def waited(self, seconds: float) -> None: ...

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array: ...

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None: ...

    def found(self, slots: Int32Array, num_found: Int32Array) -> None: ...


class ChosenDrafts(NamedTuple):
    """Of decode rows, as in a plan."""

    num_drafts: Int32Array
    given_drafts: Int32Array


NO_DRAFTS_CHOSEN = ChosenDrafts(NO_IDS, NO_DRAFTS)


class Drafting:
    """Between the plans of a scheduler and the policy."""

    def __init__(
        self, state: SchedulerState, packer: Packer, policy: DraftPolicy, spec: RunnerSpec
    ) -> None:
        self._state = state
        self._packer = packer
        self._policy = policy
        self._max_rows = spec.max_num_seqs  # of a step
        self._any_found = self._guesses_now = False
        self._forced: dict[int, ForcedTokens] = {}  # by slot
        # Of several stages only the last one knows its guesses: plans say them to the others.
        # All sequences have had their turn after as many plans.
        self._says_guesses, self._num_turns = spec.num_stages > 1, spec.num_stages
        self._turn, self._rests = 0, False
        self._said: dict[int, tuple[int, ...]] = {}  # guesses by slot
        self._drafter_N = np.zeros(spec.max_num_seqs, dtype=np.int32)  # of what a slot has
        self.counts = DraftCounts(spec.max_drafts)

    def begin(self, slots: tuple[SlotDelta, ...]) -> None:
        for delta in slots:
            self._policy.begin(delta.slot)
            self._said.pop(delta.slot, None)

    def waited(self, seconds: float) -> None:
        if not self._says_guesses:  # what a step takes is its whole way through the stages
            self._policy.waited(seconds)

    def foresee(self, forced: Iterable[ForcedTokens]) -> None:
        """Take tokens that must come, whatever is drawn before them."""
        self._forced.update({each.slot: each for each in forced})

    def choose(self, decodes: list[Sequence]) -> ChosenDrafts:
        """Choose drafts for decode rows. Empty: none has any.

        Those that are forced go first: a row for each gives a token, as it would later.
        """
        if self._turn == 0:
            self._rests = self._policy.rests()
        self._turn = (self._turn + 1) % self._num_turns
        self._guesses_now = not self._rests and self._any_found
        if not (self._forced or self._guesses_now):
            return NO_DRAFTS_CHOSEN
        # Whatever starts in this step has rows, too.
        room = self._max_rows - len(self._state.running) - self._state.num_waiting
        given: dict[int, tuple[int, ...]] = {}
        for row, sequence in enumerate(decodes) if self._forced else ():
            if sequence.slot in self._forced and (tokens := self._given(sequence, room)):
                given[row] = tokens
                room -= len(tokens)
        num_drafts = self._guesses(decodes, room)
        if self._says_guesses:
            for row in np.flatnonzero(num_drafts).tolist():
                given[row] = self._said[decodes[row].slot][: num_drafts[row]]
        if not given:
            return ChosenDrafts(num_drafts, NO_DRAFTS)
        if not len(num_drafts):
            num_drafts = np.zeros(len(decodes), dtype=np.int32)
        longest = max(map(len, given.values()))
        given_QK = np.full((len(decodes), longest), DEVICE_TOKEN, dtype=np.int32)
        for row, tokens in given.items():
            num_drafts[row] = len(tokens)
            given_QK[row, : len(tokens)] = tokens
        return ChosenDrafts(num_drafts, given_QK)

    def _given(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """The forced tokens behind the one that a sequence's next row computes."""
        forced = self._forced[sequence.slot]
        index = sequence.num_scheduled_tokens - sequence.prompt_len + 1  # of the row's own output
        past = index - forced.start
        if forced.epoch != sequence.epoch or past >= len(forced.tokens):
            del self._forced[sequence.slot]
            return ()
        return forced.tokens[past:][: max(min(sequence.num_draftable, room), 0)]

    def _guesses(self, decodes: list[Sequence], room: int) -> Int32Array:
        if not (self._guesses_now and decodes):
            return NO_IDS
        slots_Q = int32_array([sequence.slot for sequence in decodes])
        limits_Q = int32_array([s.num_draftable if s.params.guesses else 0 for s in decodes])
        if self._says_guesses:
            said_Q = int32_array([len(self._said.get(s.slot, ())) for s in decodes])
            limits_Q = np.minimum(limits_Q, said_Q)
        positions_Q = int32_array([sequence.num_scheduled_tokens for sequence in decodes])
        return self._policy.choose(slots_Q, limits_Q, positions_Q, room)

    def settle(self, step: LaunchedStep, result: StepResult) -> None:
        """Take back what was counted for drafts that were wrong, before tokens are appended."""
        num_drafts = step.plan.num_drafts
        if len(num_drafts):
            samples = [s for s in np.flatnonzero(num_drafts).tolist() if step.samples[s].slot >= 0]
            samples = [sample for sample in samples if sample not in step.skipped]
            drafted = num_drafts[samples]
            right = result.n_valid[samples] - 1
            offered = result.num_offered[samples]
            columns = (samples, drafted.tolist(), right.tolist(), offered.tolist())
            for sample, count, valid, had in zip(*columns, strict=True):
                step.samples[sample].num_offered += had
                self._packer.reject(step.samples[sample], count, valid)
            guessed = np.array([not step.samples[s].params.structured for s in samples], np.bool_)
            slots = self._slots(step, samples)
            drafters = np.where(guessed, self._drafter_N[slots], GRAMMAR)
            self.counts.add(drafters, offered, np.maximum(right, 0))
            if guessed.any():  # of what is forced there is nothing to learn
                self._policy.seen(slots[guessed], offered[guessed], right[guessed])
        self._any_found = len(result.num_found) > 0 and bool(result.num_found.any())
        if self._any_found:
            # Not of those that ended, or were skipped and preempted since.
            samples = [s for s, sequence in enumerate(step.samples) if sequence.slot >= 0]
            slots = self._slots(step, samples)
            drafters = result.found_by[samples]
            for place in np.flatnonzero(drafters == PREDICTION).tolist():
                if not step.samples[samples[place]].params.is_predicted:
                    drafters[place] = SUFFIX
            self._drafter_N[slots] = drafters
            self._policy.found(slots, result.num_found[samples])
        if self._says_guesses:
            self._hear(step, result)

    def _hear(self, step: LaunchedStep, result: StepResult) -> None:
        """Keep the guesses of a step's sequences for their next rows, in whichever step those are;
        other sequences' stay."""
        samples = [s for s, sequence in enumerate(step.samples) if sequence.slot >= 0]
        slots = self._slots(step, samples)
        counts = result.num_found[samples] if self._any_found else np.zeros_like(slots)
        for sample, slot, count in zip(samples, slots.tolist(), counts.tolist(), strict=True):
            self._said.pop(slot, None)
            if count:
                self._said[slot] = tuple(result.drafts[sample, :count].tolist())
        self._policy.found(slots, counts)
        self._any_found = bool(self._said)

    @staticmethod
    def _slots(step: LaunchedStep, samples: list[int]) -> Int32Array:
        return int32_array([step.samples[sample].slot for sample in samples])
