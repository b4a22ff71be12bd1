"""Drafting: how many of the device's guesses each row gets, and what their results mean.

A plan is made before it is known how many drafts of the step before were right. So it counts all of
them as scheduled, which is what pages are taken for, and the device knows better; with the result
the count comes down.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from services.compute.scheduler.packing import Packer
from services.compute.scheduler.sequence import LaunchedStep, Sequence
from services.compute.scheduler.state import SchedulerState
from services.compute.step import NO_IDS, Int32Array, SlotDelta, StepResult, int32_array


class DraftPolicy(Protocol):
    """Chooses numbers of drafts by slot; `speculative.controller` says what its calls mean."""

    def begin(self, slot: int) -> None: ...

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array: ...

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None: ...

    def found(self, slots: Int32Array, num_found: Int32Array) -> None: ...


class Drafting:
    """Between the plans of a scheduler and the policy."""

    def __init__(
        self, state: SchedulerState, packer: Packer, policy: DraftPolicy, max_rows: int
    ) -> None:
        self._state = state
        self._packer = packer
        self._policy = policy
        self._max_rows = max_rows  # of a step
        self._any_found = False
        self.num_drafts_total = 0  # that the device had
        self.num_accepted_total = 0

    def begin(self, slots: tuple[SlotDelta, ...]) -> None:
        for delta in slots:
            self._policy.begin(delta.slot)

    def choose(self, decodes: list[Sequence]) -> Int32Array:
        """Choose numbers of drafts for decode rows. Empty: none has any."""
        if not (self._any_found and decodes):
            return NO_IDS
        # Whatever starts in this step has rows, too.
        room = self._max_rows - len(self._state.running) - self._state.num_waiting
        slots_Q = int32_array([sequence.slot for sequence in decodes])
        limits_Q = int32_array([sequence.num_draftable for sequence in decodes])
        positions_Q = int32_array([sequence.num_scheduled_tokens for sequence in decodes])
        return self._policy.choose(slots_Q, limits_Q, positions_Q, room)

    def settle(self, step: LaunchedStep, result: StepResult) -> None:
        """Take back what was counted for drafts that were wrong, before tokens are appended."""
        num_drafts = step.plan.num_drafts
        if len(num_drafts):
            samples = [s for s in np.flatnonzero(num_drafts).tolist() if step.samples[s].slot >= 0]
            drafted = num_drafts[samples]
            right = result.n_valid[samples] - 1
            for sample, count, valid in zip(samples, drafted.tolist(), right.tolist(), strict=True):
                self._packer.reject(step.samples[sample], count, valid)
            offered = result.num_offered[samples]
            self.num_drafts_total += int(offered.sum())
            self.num_accepted_total += int(right.sum())
            self._policy.seen(self._slots(step, samples), offered, right)
        self._any_found = bool(result.num_found.any())
        if self._any_found:
            # Not of those that ended, or were skipped and preempted since.
            samples = [s for s, sequence in enumerate(step.samples) if sequence.slot >= 0]
            self._policy.found(self._slots(step, samples), result.num_found[samples])

    @staticmethod
    def _slots(step: LaunchedStep, samples: list[int]) -> Int32Array:
        return int32_array([step.samples[sample].slot for sample in samples])
