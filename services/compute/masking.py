"""Masks of structured samples: how long the device waits for them, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from services.compute.grammar.protocol import MaskSource
from services.compute.scheduler.scheduler import Scheduler
from services.compute.step import StepPlan, TokenMasks

MASK_PATIENCE_S = 0.005  # masks of JSON take 64 rows 0.5 ms
LOOK_AGAIN_S = 0.003  # while others wait: what they wait for may be there though nobody is woken


@dataclass(frozen=True, slots=True)
class _Late:
    """The last mask of a slot that was late."""

    mask: tuple[int, int]  # epoch and output index
    again: bool  # late for the next step, too
    is_slow: bool  # so was it or one before it, and none has come sooner since


class Masking:
    """Waits for masks as long as that costs the other sequences no more than to go on without.

    A sample whose mask is late is rescheduled if another sequence runs or could join. Else the
    device just waits. Computing it again takes its share of a step: for so long the others wait for
    it, unless its mask before was late by more than a step.
    """

    def __init__(self, scheduler: Scheduler, mask_source: MaskSource) -> None:
        self._scheduler = scheduler
        self._mask_source = mask_source
        self._late: dict[int, _Late] = {}  # by slot

    def masks(
        self, plan: StepPlan, due_in_s: float, step_s: float, force: bool = False
    ) -> TokenMasks | float:
        """Return the masks to sample the plan with, or in how long to look again at the latest.

        The device would soon be idle in `due_in_s`. `step_s` is what a step takes, 0 where nothing
        is waited for that makes it so.
        """
        ready, failures = self._mask_source.look(plan)
        if failures:
            self._scheduler.fail_samples(plan, failures)
        samples = np.array(plan.structured, dtype=np.int32)
        missing: list[int] = samples[~ready].tolist()
        if missing and not force:
            waiting = self._scheduler.live_samples(plan, missing)
            if waiting and due_in_s > 0.0:
                return due_in_s
            wait_s = due_in_s + self._worth_s(plan, waiting, step_s) if waiting else 0.0
            if wait_s > 0.0:
                return wait_s if wait_s == inf else min(wait_s, LOOK_AGAIN_S)
        if missing:
            self._scheduler.reschedule(plan, missing)
        if missing or self._late:
            self._remember(plan, missing, samples[ready].tolist())
        return TokenMasks(samples[ready], self._mask_source.bits_GW(plan, ready), tuple(missing))

    def may_come_soon(self, plan: StepPlan) -> bool:
        """Whether a mask is missing that is not of a sequence whose last one was late, too."""
        samples = np.array(plan.structured, dtype=np.intp)
        missing: list[int] = samples[~self._mask_source.look(plan).ready].tolist()
        return any(not self._was_late(slot, mask[0]) for slot, mask in _masks_of(plan, missing))

    def may_force(self) -> bool:
        """Whether a mask is on its way whose tokens a step could compute at once, and may come
        soon: not one of a sequence whose last one was late."""
        if not self._scheduler.foresees:
            return False
        return any(not self._was_late(*awaited) for awaited in self._mask_source.awaited())

    def _was_late(self, slot: int, epoch: int) -> bool:
        late = self._late.get(slot)
        return late is not None and late.mask[0] == epoch

    def _is_slow(self, slot: int, epoch: int) -> bool:
        return self._was_late(slot, epoch) and self._late[slot].is_slow

    def _remember(self, plan: StepPlan, missing: list[int], ready: list[int]) -> None:
        for slot, mask in _masks_of(plan, missing):
            late = self._late.get(slot)
            again = late is not None and late.mask == mask
            self._late[slot] = _Late(mask, again, again or self._is_slow(slot, mask[0]))
        for slot, mask in _masks_of(plan, ready) if self._late else ():
            late = self._late.get(slot)
            if late is not None and late.mask < mask:  # this one was in time
                del self._late[slot]
            elif late is not None and not late.again:
                self._late[slot] = replace(late, is_slow=False)

    def _worth_s(self, plan: StepPlan, waiting: list[int], step_s: float) -> float:
        """How long the device may be idle for these samples' masks."""
        stats = self._scheduler.stats()
        can_join = stats.num_waiting + stats.num_swapped > 0 and stats.num_running < stats.num_slots
        if not can_join and stats.num_running <= len(waiting):
            return inf
        masks = _masks_of(plan, waiting) if self._late else ()
        num_slow = sum(self._is_slow(slot, epoch) for slot, (epoch, _) in masks)
        return step_s * (len(waiting) - num_slow) / len(plan.sample_row)


def _masks_of(plan: StepPlan, samples: list[int]) -> list[tuple[int, tuple[int, int]]]:
    """Slot, and epoch and output index of its mask, of structured samples of a plan."""
    rows = plan.sample_row[samples]
    columns = (plan.row_slot[rows], plan.row_epoch[rows], plan.sample_index[samples])
    slots, epochs, indices = (column.tolist() for column in columns)
    return list(zip(slots, zip(epochs, indices, strict=True), strict=True))
