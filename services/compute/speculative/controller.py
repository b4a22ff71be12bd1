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
from typing import Any

import numpy as np
import numpy.typing as npt

from services.compute.speculative.place_rates import FloatArray, PlaceRates
from services.compute.speculative.step_costs import StepCosts
from services.compute.step import NO_IDS, Int32Array

SHORT_REST, LONG_REST = 15, 120
"""Steps behind one in which no draft was worth it that are not asked whether one is: choosing takes
0.1 to 0.2 ms, 5 % of a step of a small model on a CPU. A rest is twice as long as the one before if
what was tried in between was tried in vain."""

FEW_RIGHT = 2  # drafts, of which fewer are none

HOPED_RATE = 0.8
"""At which drafts would have to pay to be tried once more, behind such a rest, by one row: where 64
rows had none, since half of all drafts were believed to be right, nobody learned that all were."""

NUM_WAITS = 31
"""Of the device for the host that are remembered. Where the host works while the device does they
are about 0; on a CPU it is the same thread, and a small model's step takes a fifth more for it."""

FEW_WAITS = 8
"""With drafts, below which those without count, too: if the first one was long, as other programs
wanted the processor, drafts would never pay again, and nobody would learn that waits are short."""

LEAST_SHARE = 0.001  # of a step in what one more row takes: measured, it may be none

APART = 1e9  # more than drafts a second that rows can be worth

LEAST_GAIN = 1.01
"""Of a step with drafts over one without, below which there are none: what is believed is noisy."""


def first_belief(has_weights: bool) -> tuple[float, float]:
    """A rate that is believed before drafts were tried, and the number of drafts that it is worth.

    Those of a model take a pass each, and would at 0.5 never be where a pass takes half a step.
    There one wrong draft would else be the last for long: with drafts right at 0.8 that gave 0.94
    of the best fixed number, and 0.97 with four. Of those from the text, right at 0.3, one stream
    had 0.78 after an unlucky beginning, and 0.98 with three.
    """
    return (0.8, 4.0) if has_weights else (0.65, 3.0)


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
        self._rates = PlaceRates(num_slots, max_drafts, first_rate, first_weight)
        self._max_drafts = max_drafts
        self._number_K = np.arange(1, max_drafts + 1)
        self._reads_K = self._number_K % costs.rows_together == 0  # a context, once more
        self._hoped_K = HOPED_RATE**self._number_K
        self._found_N = np.zeros(num_slots, dtype=np.int32)
        self._num_rows = 1  # of the last step that was asked about
        self._rest = SHORT_REST / 2  # how long the last one was
        self._resting = self._num_untried = self._num_right = 0
        self._has_rested = False
        self._drafts = False  # in the step that was planned last
        self._waits_s = deque[float](maxlen=NUM_WAITS), deque[float](maxlen=NUM_WAITS)  # and with

    def begin(self, slot: int) -> None:
        """A sequence takes a slot."""
        self._found_N[slot] = 0
        self._rates.begin(slot)
        # What was tried in vain counts half as much when as many have begun as there were.
        self._rest -= max(self._rest - SHORT_REST, 0.0) / (2 * self._num_rows)
        self._resting = min(self._resting, int(self._rest))

    def rests(self) -> bool:
        """Whether `choose` need not be asked for the next step; to be called once for each."""
        self._drafts = False
        self._num_untried += 1
        self._resting -= self._resting > 0
        return self._resting > 0

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        """Drafts for each row; at most its limit, and `num_rows` together. Empty: none at all."""
        most_Q = np.minimum(np.minimum(self._found_N[slots_Q], limits_Q), self._max_drafts)
        if num_rows <= 0 or most_Q.max(initial=0) <= 0:
            return NO_IDS
        self._num_rows = len(slots_Q)
        self._rates.forget(slots_Q, self._num_untried)
        self._num_untried = 0
        num_drafts = self._best(self._rates.survival(slots_Q), most_Q, positions_Q, num_rows)
        if not len(num_drafts) and self._has_rested:
            hoped_QK = np.tile(self._hoped_K, (len(slots_Q), 1))
            num_drafts = self._best(hoped_QK, most_Q, positions_Q, num_rows)
            if len(num_drafts):
                num_drafts = self._of_one(num_drafts, slots_Q)
        self._drafts = len(num_drafts) > 0
        if self._drafts:
            self._has_rested = False
        else:
            self._begin_rest()
        return num_drafts

    def _begin_rest(self) -> None:
        was_in_vain = self._num_right < FEW_RIGHT
        self._rest = min(2 * self._rest, LONG_REST) if was_in_vain else float(SHORT_REST)
        self._resting, self._has_rested, self._num_right = int(self._rest), True, 0
        waits_s = self._waits_s[True]
        for _ in range(len(waits_s) // 2):  # what was so then need not be so now
            waits_s.popleft()

    def _of_one(self, num_drafts: Int32Array, slots_Q: Int32Array) -> Int32Array:
        """Those of the row of which least is known."""
        order = self._rates.least_tried(slots_Q)
        row = next(row for row in order.tolist() if num_drafts[row])
        alone = np.zeros_like(num_drafts)
        alone[row] = num_drafts[row]
        return alone

    def _best(
        self, survival_QK: FloatArray, most_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        """As many as give the most tokens a second, if drafts were right so often."""
        num_places = self._max_drafts
        survival_QK[self._number_K > most_Q[:, None]] = -1.0
        num_there = min(int(np.maximum(most_Q, 0).sum()), num_rows)
        # Those first that give most for what they take; ties go to the rows before, and no draft
        # comes before those that it needs.
        worth_QK = np.minimum.accumulate(survival_QK / self._draft_s(positions_Q), axis=1)
        if self._costs.pass_s:  # shared by all rows: none has two before others have one
            worth_QK -= np.where(survival_QK > 0.0, self._number_K, num_places + 1) * APART
        order = np.argsort(-worth_QK, axis=None, kind="stable")[:num_there]
        rows = order // num_places
        tokens = len(most_Q) + _summed(survival_QK.ravel()[order])
        step_s = self._costs.seconds(len(most_Q) + np.arange(len(tokens)))
        step_s += self._passes_s(order % num_places)
        seen = positions_Q.sum() + _summed(positions_Q[rows] * self._reads_K[order % num_places])
        step_s[0] += self._wait_s(drafts=False)
        step_s[1:] += self._wait_s(drafts=True)
        rates = tokens / (step_s + seen * self._costs.position_s)
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * rates[0]:
            return NO_IDS
        num_drafts: Int32Array = np.bincount(rows[:best], minlength=len(most_Q)).astype(np.int32)
        return num_drafts

    def waited(self, seconds: float) -> None:
        """The device has waited so long for a step: one step less takes so much less, too."""
        self._waits_s[self._drafts].append(seconds)

    def _wait_s(self, drafts: bool) -> float:
        """What a step takes beside its computing: the middle of the last waits. One with drafts
        takes the host longer."""
        own_s, others_s = self._waits_s[drafts], self._waits_s[not drafts]
        is_known = len(own_s) >= FEW_WAITS if drafts else len(own_s) > 0
        waits_s = sorted(own_s if is_known else [*own_s, *others_s])
        return waits_s[len(waits_s) // 2] if waits_s else 0.0

    def _passes_s(self, numbers: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """What a drafter takes for the first of these drafts, the first two …, by their numbers in
        their rows: each pass gives all rows one that have so many."""
        rows_K = np.cumsum(numbers[:, None] == self._number_K - 1, axis=0)
        passes_s: FloatArray = self._costs.pass_seconds(rows_K).sum(axis=1)
        return np.concatenate(([0.0], passes_s))

    def _draft_s(self, positions_Q: Int32Array) -> FloatArray:
        """Roughly what one more row takes in a step of so many: [Q, K]."""
        step_s, larger_s = self._costs.seconds(len(positions_Q) + np.arange(2))
        read_s = np.outer(positions_Q * self._costs.position_s, self._reads_K)
        draft_s: FloatArray = max(larger_s - step_s, LEAST_SHARE * step_s) + read_s
        return draft_s

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None:
        """So many drafts of these slots were there, and so many, the first of them, were right."""
        self._resting = self._num_untried = 0
        self._has_rested = False
        self._num_right += int(right.sum())
        self._rates.seen(slots, offered, right)

    def found(self, slots: Int32Array, num_found: Int32Array) -> None:
        """So many drafts are there for the next step of these slots."""
        self._found_N[slots] = num_found


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
