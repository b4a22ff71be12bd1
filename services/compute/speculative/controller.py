"""How many drafts each decode row of a step gets: as many as let it give more tokens a second.

A draft is right with some probability and, behind a wrong one, for nothing; and a step takes longer
with each row, the more the longer its context, and with each pass of a drafter that has to compute.
So of all drafts that rows could have those come first that are likely to be right for what they
take, as many of them as give the most expected tokens in the step's measured time. None is an
answer, too.

Shape legend: Q decode rows, K drafts of a row, N slots.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from services.compute.speculative.step_costs import StepCosts
from services.compute.step import NO_IDS, Int32Array

FloatArray: TypeAlias = npt.NDArray[np.float64]

MEMORY = 0.97
"""Of what was seen so far in what is believed after another step: thirty steps or so. With five, 16
streams whose drafts are all wrong lost 5 %: that none of five was right is little to know."""

FORGETTING = 0.99
"""The same after a step in which the drafts that were there were not tried: so after a hundred or
two they are."""

RESTING = 15
"""Steps after one in which no draft was worth it that are not asked whether one is: choosing takes
0.1 to 0.2 ms, 5 % of a step of a small model on a CPU."""

NUM_WAITS = 31
"""Of the device for the host that are remembered. Where the host works while the device does they
are about 0; on a CPU it is the same thread, and a small model's step takes a fifth more for it."""

LEAST_SHARE = 0.001  # of a step in what one more row takes: measured, it may be none

OTHERS_WEIGHT = 16.0
"""Of all drafts until now in what is believed of one row's, in drafts. Without it rows that were
lucky get too many: 128 rows whose drafts are right at 0.3 gave 0.93 of the best fixed number, and
0.99 with it."""

APART = 1e9  # more than drafts a second that rows can be worth

LEAST_GAIN = 1.01
"""Of a step with drafts over one without, below which there are none: what is believed is noisy."""


class DraftController:
    """Chooses from what was accepted lately; synchronous, and knows no clock."""

    def __init__(
        self,
        num_slots: int,
        max_drafts: int,
        costs: StepCosts,
        first_rate: float = 0.5,
        first_weight: float = 1.0,
    ) -> None:
        """`first_rate` is believed as if of `first_weight` drafts so many had been right."""
        self._costs = costs
        self._first_weight, self._first_right = first_weight, first_weight * first_rate
        self._max_drafts = max_drafts
        self._power_K = np.arange(1, max_drafts + 1)
        self._found_N = np.zeros(num_slots, dtype=np.int32)
        self._right_N = np.zeros(num_slots)
        self._tried_N = np.zeros(num_slots)
        self._all_right = self._all_tried = 0.0
        self._resting = 0
        self._waits_s: deque[float] = deque(maxlen=NUM_WAITS)

    def begin(self, slot: int) -> None:
        """A sequence takes a slot."""
        self._found_N[slot] = 0
        self._right_N[slot] = self._tried_N[slot] = 0.0

    def rests(self) -> bool:
        """Whether `choose` need not be asked for the next step; to be called once for each."""
        self._resting -= self._resting > 0
        return self._resting > 0

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        """Drafts for each row; at most its limit, and `num_rows` together. Empty: none at all."""
        most_Q = np.minimum(np.minimum(self._found_N[slots_Q], limits_Q), self._max_drafts)
        if num_rows <= 0 or most_Q.max(initial=0) <= 0:
            return NO_IDS
        survival_QK = self._rate(slots_Q)[:, None] ** self._power_K
        survival_QK[self._power_K > most_Q[:, None]] = -1.0
        num_there = min(int(np.maximum(most_Q, 0).sum()), num_rows)
        # Those first that give most for what they take; ties go to the rows before.
        worth_QK = survival_QK / self._row_s(positions_Q)[:, None]
        if self._costs.pass_s:  # shared by all rows: none has two before others have one
            worth_QK -= np.where(survival_QK > 0.0, self._power_K, len(self._power_K) + 1) * APART
        order = np.argsort(-worth_QK, axis=None, kind="stable")[:num_there]
        rows = order // len(self._power_K)
        tokens = len(slots_Q) + _summed(survival_QK.ravel()[order])
        step_s = self._costs.seconds(len(slots_Q) + np.arange(len(tokens)))
        step_s += self._passes_s(order % len(self._power_K))
        seen = positions_Q.sum() + _summed(positions_Q[rows])
        rates = tokens / (self._waits_of_s() + step_s + seen * self._costs.position_s)
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * rates[0]:
            self._forget(slots_Q)
            self._resting = RESTING + 1
            return NO_IDS
        num_drafts: Int32Array = np.bincount(rows[:best], minlength=len(slots_Q)).astype(np.int32)
        return num_drafts

    def waited(self, seconds: float) -> None:
        """The device has waited so long for a step: one step less takes so much less, too."""
        self._waits_s.append(seconds)

    def _waits_of_s(self) -> float:
        """What a step takes beside its computing: the middle of the last waits."""
        waits_s = sorted(self._waits_s)
        return waits_s[len(waits_s) // 2] if waits_s else 0.0

    def _forget(self, slots_Q: Int32Array) -> None:
        """As after this step without drafts and those that follow it."""
        kept = FORGETTING ** (1 + RESTING)
        self._tried_N[slots_Q] *= kept
        self._right_N[slots_Q] *= kept
        self._all_tried *= kept
        self._all_right *= kept

    def _passes_s(self, numbers: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """What a drafter takes for the first of these drafts, the first two …, by their numbers in
        their rows: each pass gives all rows one that have so many."""
        rows_K = np.cumsum(numbers[:, None] == self._power_K - 1, axis=0)
        passes_s: FloatArray = self._costs.pass_seconds(rows_K).sum(axis=1)
        return np.concatenate(([0.0], passes_s))

    def _row_s(self, positions_Q: Int32Array) -> FloatArray:
        """Roughly what one more row takes in a step of so many."""
        step_s, larger_s = self._costs.seconds(len(positions_Q) + np.arange(2))
        row_s: FloatArray = max(larger_s - step_s, LEAST_SHARE * step_s) + (
            positions_Q * self._costs.position_s
        )
        return row_s

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None:
        """So many drafts of these slots were there, and so many, the first of them, were right."""
        self._resting = 0
        tried = np.minimum(right + 1, offered)  # behind a wrong one nothing is learned
        self._tried_N[slots] = self._tried_N[slots] * MEMORY + tried
        self._right_N[slots] = self._right_N[slots] * MEMORY + right
        self._all_tried = self._all_tried * MEMORY + float(tried.sum())
        self._all_right = self._all_right * MEMORY + float(right.sum())

    def found(self, slots: Int32Array, num_found: Int32Array) -> None:
        """So many drafts are there for the next step of these slots."""
        self._found_N[slots] = num_found

    def _rate(self, slots_Q: Int32Array) -> FloatArray:
        """What is believed of each row's drafts: what was seen of them, and of all until now."""
        of_all = (self._all_right + self._first_right) / (self._all_tried + self._first_weight)
        right_Q = self._right_N[slots_Q] + OTHERS_WEIGHT * of_all
        rate_Q: FloatArray = right_Q / (self._tried_N[slots_Q] + OTHERS_WEIGHT)
        return rate_Q


def _summed(values: npt.NDArray[Any]) -> FloatArray:
    """Sums of none, of the first one, of the first two …"""
    return np.concatenate(([0.0], np.cumsum(values)))


class FixedDrafts:
    """As many drafts for every row as were asked for, where there are any."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._found_N = np.zeros(num_slots, dtype=np.int32)

    def begin(self, slot: int) -> None:
        self._found_N[slot] = 0

    def rests(self) -> bool:
        return False

    def waited(self, seconds: float) -> None:
        pass

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        wanted_Q = np.minimum(np.minimum(self._found_N[slots_Q], limits_Q), self._num_drafts)
        most_Q = np.minimum(np.maximum(wanted_Q, 0).cumsum(), max(num_rows, 0))
        num_drafts: Int32Array = np.diff(most_Q, prepend=0).astype(np.int32)
        return num_drafts if num_drafts.any() else NO_IDS

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None:
        pass

    def found(self, slots: Int32Array, num_found: Int32Array) -> None:
        self._found_N[slots] = num_found
