"""The guided sequences that hold slots, as compute knows them: enough to place them again."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.messages.failure import Failure
from services.compute.grammar.frames import Place
from services.compute.grammar.masks import Int64Array, MaskMemory, stamp
from services.compute.grammar.protocol import Look
from services.compute.step import BoolArray, Int32Array, SlotDelta, StepPlan, StepResult

MAX_DEATHS = 3  # of the guide while it worked on one sequence's mask; it may have been killed
MAX_TURNS = 12  # of others, each as long as a mask may take, before one's own
_NONE = np.zeros((0, 4), dtype=np.int32)


@dataclass(slots=True)
class _Placed:
    delta: SlotDelta
    outputs: array[int]
    asked_s: float
    num_deaths: int = 0

    @property
    def stamp(self) -> int:
        return stamp(self.delta.epoch, len(self.outputs))


class Placements:
    """Knows which mask each slot waits for, how long, and which sequences will get none."""

    def __init__(self, memory: MaskMemory, timeout_s: float) -> None:
        self._memory = memory
        self._stamps_PN = np.zeros(memory.masks_PNW.shape[:2], dtype=np.int64)  # of masks named
        self._timeout_s = timeout_s
        self._placed: dict[int, _Placed] = {}
        self._failures: dict[tuple[int, int], Failure] = {}  # by slot and epoch
        self._seen_s: dict[tuple[int, int], float] = {}  # since when the guide works on these masks
        self._worked_s = 0.0  # when it was last seen to work

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, deltas: Iterable[SlotDelta], now_s: float) -> Iterator[Place]:
        """Take note of new owners of slots; what their masks are to be made of, if they have."""
        for delta in deltas:
            if self._failures:
                self._failures = {k: v for k, v in self._failures.items() if k[0] != delta.slot}
            if delta.sampling.guidance is None:
                self._placed.pop(delta.slot, None)
                continue
            placed = _Placed(delta, array("i", delta.output_ids.tobytes()), now_s)
            self._placed[delta.slot] = placed
            yield _order(placed)

    def all(self, now_s: float) -> Iterator[Place]:
        """Everybody, for a new guide."""
        for placed in self._placed.values():
            placed.asked_s = now_s
            yield _order(placed)

    def advance(
        self, plan: StepPlan, result: StepResult, void: frozenset[int], now_s: float
    ) -> Int32Array:
        """Take the tokens of a step's guided samples; what the guide has to be told of them."""
        drawn = [s for s in plan.guided if s not in void] if void else list(plan.guided)
        if not drawn:
            return _NONE
        row = plan.sample_row[drawn]
        columns = (plan.row_slot[row], plan.row_epoch[row], plan.sample_index[drawn])
        rows_R4 = np.stack((*columns, result.tokens[drawn, 0]), axis=1)
        for slot, epoch, index, token in rows_R4.tolist():
            placed = self._placed.get(slot)
            if placed is None or placed.delta.epoch != epoch or len(placed.outputs) != index:
                continue  # it ended, or the slot has another owner
            placed.outputs.append(token)
            placed.asked_s = now_s
            placed.num_deaths = 0
            if token in placed.delta.stop_ids or index + 1 >= placed.delta.sampling.max_tokens:
                del self._placed[slot]
        return rows_R4

    def look(self, plan: StepPlan) -> Look:
        """Say which of the masks that a plan needs are there."""
        self._take_names()
        slot_G, stamp_G = _wanted(plan)
        stamps_PN = self._stamps_PN
        ready: BoolArray = (stamps_PN[0, slot_G] == stamp_G) | (stamps_PN[1, slot_G] == stamp_G)
        failures: dict[int, Failure] = {}
        if self._failures and not ready.all():
            epochs = plan.row_epoch[plan.sample_row[list(plan.guided)]].tolist()
            for sample, slot, epoch in zip(plan.guided, slot_G.tolist(), epochs, strict=True):
                failure = self._failures.get((slot, epoch))
                if failure is not None:
                    failures[sample] = failure
        return Look(ready, failures)

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        """Copy the masks of those of the plan's guided samples that are ready."""
        slot_G, stamp_G = _wanted(plan)
        slot_G, stamp_G = slot_G[ready], stamp_G[ready]
        plane_G = (self._stamps_PN[0, slot_G] != stamp_G).astype(np.intp)
        bits_GW: Int32Array = self._memory.masks_PNW[plane_G, slot_G]
        return bits_GW

    def fail(self, slot: int, epoch: int, message: str, status: int = 400) -> None:
        """The guide has no mask for a sequence any more; whoever wrote its grammar is to know."""
        placed = self._placed.get(slot)
        if placed is None or placed.delta.epoch != epoch:
            return
        del self._placed[slot]
        guidance = placed.delta.sampling.guidance
        field = guidance.field if guidance is not None else None
        told = f"The answer cannot be gone on with under {field}: {message}."
        self._failures[slot, epoch] = Failure(status, "grammar_failed", told, field)

    def fail_all(self, message: str) -> None:
        """There will be no masks for anybody."""
        for slot, placed in list(self._placed.items()):
            self.fail(slot, placed.delta.epoch, message, 500)

    def overdue(self, now_s: float) -> bool:
        """Fail whose mask takes too long; True if the guide is stuck and must die.

        Only who is worked on is at fault: who waits behind others has the time of MAX_TURNS masks
        that are as slow as may be. To be called often; it measures from call to call.
        """
        worked_on = [(slot, self._placed[slot].stamp) for slot in self._worked_on()]
        self._seen_s = {work: self._seen_s.get(work, now_s) for work in worked_on}
        if worked_on:
            self._worked_s = now_s
        told = f"its next token's mask takes over {self._timeout_s:g} s"
        stuck = [w for w, seen_s in self._seen_s.items() if now_s - seen_s >= self._timeout_s]
        for slot, _ in stuck:
            self.fail(slot, self._placed[slot].delta.epoch, told)
        waiting = self._waiting(now_s - self._timeout_s)
        is_idle = bool(waiting) and now_s - self._worked_s >= self._timeout_s
        for slot, placed in waiting.items():
            if now_s - placed.asked_s >= MAX_TURNS * self._timeout_s:
                self.fail(slot, placed.delta.epoch, told)
            elif is_idle:
                self._blame(slot, "the process that makes its masks does nothing", 500)
        return bool(stuck) or is_idle

    def guide_died(self) -> None:
        """Count the death against the sequences that the guide was working on; its masks go, too:
        the next guide makes all of them again, in the same places."""
        for slot in self._worked_on():
            self._blame(slot, "the process that makes its masks dies of it", 400)
        self._memory.lanes[:] = 0
        while len(self._memory.named()):
            pass
        self._stamps_PN[:] = 0
        self._seen_s = {}

    def _blame(self, slot: int, told: str, status: int) -> None:
        placed = self._placed[slot]
        placed.num_deaths += 1
        if placed.num_deaths >= MAX_DEATHS:
            self.fail(slot, placed.delta.epoch, told, status)

    def _take_names(self) -> None:
        """Learn which masks have been made."""
        rows_R4 = self._memory.named()
        if len(rows_R4):
            slot_R, plane_R, epoch_R, index_R = rows_R4.T
            self._stamps_PN[plane_R, slot_R] = epoch_R.astype(np.int64) << 32 | index_R

    def _waiting(self, since_s: float) -> dict[int, _Placed]:
        """Who asked for a mask by then and still has none, by slot."""
        self._take_names()
        return {
            slot: placed
            for slot, placed in self._placed.items()
            if placed.asked_s <= since_s and placed.stamp not in self._stamps_PN[:, slot]
        }

    def _worked_on(self) -> list[int]:
        """The slots whose masks the guide is making."""
        lanes: Sequence[int] = self._memory.lanes.tolist()
        slots: Sequence[int] = self._memory.lane_slots.tolist()
        working = zip(lanes, slots, strict=True)
        return [
            slot
            for lane, slot in working
            if lane and slot in self._placed and self._placed[slot].delta.epoch == lane >> 32
        ]


def _wanted(plan: StepPlan) -> tuple[Int32Array, Int64Array]:
    """Slot and stamp of the masks that a plan needs."""
    guided = list(plan.guided)
    row_G = plan.sample_row[guided]
    epoch_G = plan.row_epoch[row_G].astype(np.int64)
    return plan.row_slot[row_G], epoch_G << 32 | plan.sample_index[guided]


def _order(placed: _Placed) -> Place:
    delta = placed.delta
    guidance = delta.sampling.guidance
    if guidance is None:
        raise RuntimeError(f"slot {delta.slot} is not guided")
    return Place(
        delta.slot,
        delta.epoch,
        guidance,
        tuple(sorted(set(delta.stop_ids).difference(delta.sampling.stop_token_ids))),
        delta.sampling.stop_token_ids,
        delta.sampling.min_tokens,
        delta.sampling.ignore_eos,
        delta.sampling.max_tokens,
        tuple(placed.outputs),
    )
