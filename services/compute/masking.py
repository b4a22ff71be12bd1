"""Masks of structured samples: how long the device waits for them, and for whom."""

from __future__ import annotations

import numpy as np

from services.compute.grammar.protocol import MaskSource
from services.compute.scheduler.scheduler import Scheduler
from services.compute.step import BoolArray, StepPlan, TokenMasks

MASK_PATIENCE_S = 0.005  # masks of JSON take 64 rows 0.5 ms


class Masking:
    """Waits for masks as long as that delays no other sequence.

    A sample whose mask is late is rescheduled if another sequence runs or could join. Else the
    device just waits.
    """

    def __init__(self, scheduler: Scheduler, mask_source: MaskSource) -> None:
        self._scheduler = scheduler
        self._mask_source = mask_source
        self._late: dict[int, tuple[int, int]] = {}  # slot: owner's epoch, index of a late mask

    def masks(self, plan: StepPlan, late: bool, force: bool = False) -> TokenMasks | None:
        """Return the masks to sample the plan with, or None to go on waiting (`Engine.sample`)."""
        ready, failures = self._mask_source.look(plan)
        if failures:
            self._scheduler.fail_samples(plan, failures)
        samples = np.array(plan.structured, dtype=np.int32)
        missing: list[int] = samples[~ready].tolist()
        if missing and not force:
            waiting = self._scheduler.live_samples(plan, missing)
            if waiting and not (late and self._concerns_others(len(waiting))):
                return None
        if missing:
            self._scheduler.reschedule(plan, missing)
        if missing or self._late:
            self._remember(plan, ready)
        return TokenMasks(samples[ready], self._mask_source.bits_GW(plan, ready), tuple(missing))

    def may_come_soon(self, plan: StepPlan) -> bool:
        """Whether a mask is missing that is not of a sequence whose last one was late, too."""
        missing = ~self._mask_source.look(plan).ready
        return any(self._late.get(s, (0, 0))[0] != e for s, e, _ in _whose(plan, missing))

    def may_force(self) -> bool:
        """Whether a mask is on its way whose tokens a step could compute at once, and may come
        soon: not one of a sequence whose last one was late."""
        if not self._scheduler.foresees:
            return False
        awaited = self._mask_source.awaited()
        return any(self._late.get(slot, (0, 0))[0] != epoch for slot, epoch in awaited)

    def _remember(self, plan: StepPlan, ready: BoolArray) -> None:
        for slot, epoch, index in _whose(plan, ~ready):
            self._late[slot] = epoch, index
        for slot, epoch, index in _whose(plan, ready) if self._late else ():
            if self._late.get(slot, (epoch, index)) < (epoch, index):  # this one was in time
                del self._late[slot]

    def _concerns_others(self, num_late: int) -> bool:
        stats = self._scheduler.stats()
        can_join = stats.num_waiting + stats.num_swapped > 0 and stats.num_running < stats.num_slots
        return can_join or stats.num_running > num_late


def _whose(plan: StepPlan, chosen_G: BoolArray) -> list[tuple[int, int, int]]:
    """Slot, epoch and output index of some of a plan's structured samples."""
    samples = np.array(plan.structured, dtype=np.intp)[chosen_G]
    rows = plan.sample_row[samples]
    columns = plan.row_slot[rows], plan.row_epoch[rows], plan.sample_index[samples]
    return list(zip(*(column.tolist() for column in columns), strict=True))
