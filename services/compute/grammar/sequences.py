"""The structured sequences that hold slots, as compute knows them: enough to start them again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from common.messages.failure import Failure
from services.compute.grammar.protocol import (
    MOST_FORCED,
    NUM_PLANES,
    MaskMemory,
    MaskStatus,
    StartSequence,
    stamp,
)
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    Int64Array,
    SlotDelta,
    StepPlan,
    StepResult,
    int32_array,
    masks_of,
)

MAX_DEATHS = 3  # of the worker while it made one sequence's mask; it may have been killed
MAX_TURNS = 12  # of others, each as long as a mask may take, before one's own
_NONE = np.zeros((0, 4), dtype=np.int32)


@dataclass(slots=True)
class _Sequence:
    delta: SlotDelta
    outputs: array[int]
    since_s: float
    num_deaths: int = 0

    @property
    def stamp(self) -> int:
        return stamp(self.delta.epoch, len(self.outputs))


class StructuredSequences:
    """Knows which mask each slot waits for, how long, and which sequences will get none."""

    def __init__(self, memory: MaskMemory, timeout_s: float) -> None:
        self._memory = memory
        _, num_slots, self._num_words = memory.masks_PNW.shape
        self._stamps_PN = np.zeros((NUM_PLANES, num_slots), dtype=np.int64)  # of masks named
        # The first token before each of these that is forced, how many are, and which.
        self._forced_stamp_PN, self._num_forced_PN = np.zeros((2, *self._stamps_PN.shape), np.int64)
        self._forced_PNT = np.zeros((*self._stamps_PN.shape, MOST_FORCED), dtype=np.int32)
        self._new_forced: list[ForcedTokens] = []
        self._timeout_s = timeout_s
        self._sequences: dict[int, _Sequence] = {}
        self._failures: dict[tuple[int, int], Failure] = {}  # by slot and epoch
        self._seen_s: dict[tuple[int, int], float] = {}  # since when these masks are being made
        self._asked: tuple[StepPlan, Int32Array, Int64Array] | None = None
        self._worked_s = 0.0  # when the worker was last seen to work

    def __len__(self) -> int:
        return len(self._sequences)

    def place(self, deltas: Iterable[SlotDelta], now_s: float) -> Iterator[StartSequence]:
        """Take note of the new owners of slots; yield the orders for those with a grammar."""
        for delta in deltas:
            if self._failures:
                self._failures = {k: v for k, v in self._failures.items() if k[0] != delta.slot}
            if delta.sampling.grammar_spec is None:
                self._sequences.pop(delta.slot, None)
                continue
            sequence = _Sequence(delta, array("i", delta.output_ids.tobytes()), now_s)
            self._sequences[delta.slot] = sequence
            yield _order(sequence)

    def all(self, now_s: float) -> Iterator[StartSequence]:
        """Yield the orders for all sequences again, to a new worker."""
        for sequence in self._sequences.values():
            sequence.since_s = now_s
            yield _order(sequence)

    def advance(self, rows_R4: Int32Array, now_s: float) -> None:
        """Take the rows of `drawn_rows`."""
        for slot, epoch, index, token in rows_R4.tolist():
            sequence = self._sequences.get(slot)
            if sequence is None or sequence.delta.epoch != epoch or len(sequence.outputs) != index:
                continue  # it ended, or the slot has another owner
            sequence.outputs.append(token)
            sequence.since_s = now_s
            sequence.num_deaths = 0
            if token in sequence.delta.stop_ids or index + 1 >= sequence.delta.sampling.max_tokens:
                del self._sequences[slot]

    def awaited(self) -> list[tuple[int, int]]:
        """Slots and epochs of the sequences whose next mask is not there."""
        if not self._sequences:
            return []
        return [(slot, each.delta.epoch) for slot, each in self._waiting(inf).items()]

    def forced(self) -> list[ForcedTokens]:
        """Take what has become known of forced tokens since the last call."""
        if not self._sequences:
            return []
        self._take_names()
        new_forced, self._new_forced = self._new_forced, []
        return new_forced

    def look(self, plan: StepPlan) -> MaskStatus:
        self._take_names()
        slot_G, stamp_G = self._wanted(plan)
        ready = self._are_there(slot_G, stamp_G)
        failures: dict[int, Failure] = {}
        if self._failures and not ready.all():
            epochs = plan.row_epoch[plan.sample_row[list(plan.structured)]].tolist()
            for sample, slot, epoch in zip(plan.structured, slot_G.tolist(), epochs, strict=True):
                failure = self._failures.get((slot, epoch))
                if failure is not None:
                    failures[sample] = failure
        return MaskStatus(ready, failures)

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        slot_G, stamp_G = self._wanted(plan)
        slot_G, stamp_G = slot_G[ready], stamp_G[ready]
        plane_G = (self._stamps_PN[0, slot_G] != stamp_G).astype(np.intp)
        bits_GW: Int32Array = self._memory.masks_PNW[plane_G, slot_G]
        planes, forced = np.nonzero(self._are_forced(slot_G, stamp_G))
        if len(forced):
            slots = slot_G[forced]
            places = stamp_G[forced] - self._forced_stamp_PN[planes, slots]
            bits_GW[forced] = masks_of(self._forced_PNT[planes, slots, places], self._num_words)
        return bits_GW

    def fail(self, slot: int, epoch: int, message: str, status: int = 400) -> None:
        """Forget a sequence that gets no further mask; `look` has its failure from now on."""
        sequence = self._sequences.get(slot)
        if sequence is None or sequence.delta.epoch != epoch:
            return
        del self._sequences[slot]
        grammar_spec = sequence.delta.sampling.grammar_spec
        field = grammar_spec.field if grammar_spec is not None else None
        text = f"The answer cannot be gone on with under {field}: {message}."
        failure = Failure(status, "grammar_failed", text, field, retryable=status == 503)
        self._failures[slot, epoch] = failure

    def fail_all(self, message: str, status: int) -> None:
        for slot, sequence in list(self._sequences.items()):
            self.fail(slot, sequence.delta.epoch, message, status)

    def overdue(self, now_s: float) -> bool:
        """Fail the sequences whose mask takes too long; True if the worker is stuck and must die.

        Only a sequence that is being worked on is at fault; one that waits behind others has the
        time of MAX_TURNS slowest masks. It measures from call to call.
        """
        worked_on = [(slot, self._sequences[slot].stamp) for slot in self._worked_on()]
        self._seen_s = {work: self._seen_s.get(work, now_s) for work in worked_on}
        if worked_on:
            self._worked_s = now_s
        message = f"its next token's mask takes over {self._timeout_s:g} s"
        stuck = [w for w, seen_s in self._seen_s.items() if now_s - seen_s >= self._timeout_s]
        for slot, _ in stuck:
            self.fail(slot, self._sequences[slot].delta.epoch, message)
        waiting = self._waiting(now_s - self._timeout_s)
        is_idle = bool(waiting) and now_s - self._worked_s >= self._timeout_s
        for slot, sequence in waiting.items():
            if now_s - sequence.since_s >= MAX_TURNS * self._timeout_s:
                self.fail(slot, sequence.delta.epoch, message)
            elif is_idle:
                self._blame(slot, "the process that makes its masks does nothing", 500)
        return bool(stuck) or is_idle

    def worker_died(self) -> None:
        """Count the death against the sequences that were being worked on, and drop all masks."""
        for slot in self._worked_on():
            self._blame(slot, "the process that makes its masks dies of it", 400)
        self._memory.thread_stamps[:] = 0
        while len(self._memory.named()):
            pass
        self._stamps_PN[:] = 0
        self._num_forced_PN[:] = 0
        self._seen_s = {}

    def _blame(self, slot: int, message: str, status: int) -> None:
        sequence = self._sequences[slot]
        sequence.num_deaths += 1
        if sequence.num_deaths >= MAX_DEATHS:
            self.fail(slot, sequence.delta.epoch, message, status)

    def _take_names(self) -> None:
        rows_R4 = self._memory.named()
        if len(rows_R4):
            slot_R, plane_R, epoch_R, index_R, num_forced_R = rows_R4[:, :5].T
            stamp_R = epoch_R.astype(np.int64) << 32 | index_R
            self._stamps_PN[plane_R, slot_R] = stamp_R
            self._forced_stamp_PN[plane_R, slot_R] = stamp_R - num_forced_R
            self._num_forced_PN[plane_R, slot_R] = num_forced_R
            self._forced_PNT[plane_R, slot_R] = rows_R4[:, 5:]
            for row in rows_R4[num_forced_R > 0].tolist():
                slot, _, epoch, index, count = row[:5]
                tokens = tuple(row[5 : 5 + count])
                self._new_forced.append(ForcedTokens(slot, epoch, index - count, tokens))

    def _are_there(self, slot_G: Int32Array, stamp_G: Int64Array) -> BoolArray:
        named_PG = self._stamps_PN[:, slot_G] == stamp_G
        there: BoolArray = (named_PG | self._are_forced(slot_G, stamp_G)).any(axis=0)
        return there

    def _are_forced(self, slot_G: Int32Array, stamp_G: Int64Array) -> BoolArray:
        """[P, G]"""
        place_PG = stamp_G - self._forced_stamp_PN[:, slot_G]
        forced_PG: BoolArray = (place_PG >= 0) & (place_PG < self._num_forced_PN[:, slot_G])
        return forced_PG

    def _wanted(self, plan: StepPlan) -> tuple[Int32Array, Int64Array]:
        """Slots and stamps of the masks that a plan needs; it is asked about again and again."""
        if self._asked is None or self._asked[0] is not plan:
            structured = list(plan.structured)
            row_G = plan.sample_row[structured]
            epoch_G = plan.row_epoch[row_G].astype(np.int64)
            index_G = plan.sample_index[structured]
            if len(plan.num_drafts):  # of decode rows, which come first
                of_decodes = row_G < plan.num_decode_rows
                index_G[of_decodes] += plan.num_drafts[row_G[of_decodes]]
            self._asked = plan, plan.row_slot[row_G], epoch_G << 32 | index_G
        return self._asked[1:]

    def _waiting(self, until_s: float) -> dict[int, _Sequence]:
        self._take_names()
        waiting = {s: each for s, each in self._sequences.items() if each.since_s <= until_s}
        stamps = np.array([each.stamp for each in waiting.values()], dtype=np.int64)
        there = self._are_there(int32_array(list(waiting)), stamps).tolist()
        return {s: waiting[s] for s, is_there in zip(waiting, there, strict=True) if not is_there}

    def _worked_on(self) -> list[int]:
        stamps: Sequence[int] = self._memory.thread_stamps.tolist()
        slots: Sequence[int] = self._memory.thread_slots.tolist()
        return [
            slot
            for mask, slot in zip(stamps, slots, strict=True)
            if mask and slot in self._sequences and self._sequences[slot].delta.epoch == mask >> 32
        ]


def drawn_rows(plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> Int32Array:
    """The rows of `AcceptTokens` for the tokens of a step's structured samples, in order."""
    drawn = [s for s in plan.structured if s not in skipped] if skipped else list(plan.structured)
    if not drawn:
        return _NONE
    row = plan.sample_row[drawn]
    columns = (plan.row_slot[row], plan.row_epoch[row], plan.sample_index[drawn])
    rows_R4 = np.stack((*columns, result.tokens[drawn, 0]), axis=1)
    if result.tokens.shape[1] == 1:
        return rows_R4
    # Of a sample without a valid token the first one goes on: the sequence fails anyway.
    num_R = np.maximum(result.n_valid[drawn], 1)
    number_R = np.arange(num_R.sum()) - np.repeat(np.cumsum(num_R) - num_R, num_R)
    rows_R4 = np.repeat(rows_R4, num_R, axis=0)
    rows_R4[:, 2] += number_R
    rows_R4[:, 3] = result.tokens[np.repeat(drawn, num_R), number_R]
    return rows_R4


def _order(sequence: _Sequence) -> StartSequence:
    delta = sequence.delta
    grammar_spec = delta.sampling.grammar_spec
    if grammar_spec is None:
        raise RuntimeError(f"slot {delta.slot} is not structured")
    return StartSequence(
        delta.slot,
        delta.epoch,
        grammar_spec,
        tuple(sorted(set(delta.stop_ids).difference(delta.sampling.stop_token_ids))),
        delta.sampling.stop_token_ids,
        delta.sampling.min_tokens,
        delta.sampling.ignore_eos,
        delta.sampling.max_tokens,
        tuple(sequence.outputs),
    )
