"""How often drafts were right lately, by their place in a row.

One share for all places is wrong where a drafter knows two or three tokens and then no more: a
small model at names in a list, a text at the end of what it repeats.

Shape legend: N slots, Q rows, K places.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.compute.step import Int32Array

FloatArray: TypeAlias = npt.NDArray[np.float64]

KEPT = 0.99
"""Of what was seen so far, after another step: a hundred steps or so are believed."""

OTHERS_WEIGHT = 32.0
"""In drafts, of all rows in what is believed of one, and of all places in what is believed of one:
without it rows that were lucky get too many."""


class PlaceRates:
    """Shares of drafts that were right if those before them were."""

    def __init__(
        self, num_slots: int, max_drafts: int, first_rate: float, first_weight: float
    ) -> None:
        """`first_rate` is believed as if of `first_weight` drafts so many had been right."""
        self._first_weight, self._first_right = first_weight, first_weight * first_rate
        self._place_K = np.arange(max_drafts)
        self._right_NK = np.zeros((num_slots, max_drafts))
        self._tried_NK = np.zeros((num_slots, max_drafts))
        self._all_right_K = np.zeros(max_drafts)
        self._all_tried_K = np.zeros(max_drafts)

    def begin(self, slot: int) -> None:
        """A sequence takes a slot, of which nothing is known but what is believed of all."""
        self._right_NK[slot] = self._tried_NK[slot] = 0.0

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None:
        """Of so many drafts of these slots so many, the first of them, were right."""
        tried = np.minimum(right + 1, offered)  # behind a wrong one nothing is learned
        right_QK = self._place_K < right[:, None]
        tried_QK = self._place_K < tried[:, None]
        self._right_NK[slots] = self._right_NK[slots] * KEPT + right_QK
        self._tried_NK[slots] = self._tried_NK[slots] * KEPT + tried_QK
        self._all_right_K = self._all_right_K * KEPT + right_QK.sum(axis=0)
        self._all_tried_K = self._all_tried_K * KEPT + tried_QK.sum(axis=0)

    def forget(self, slots_Q: Int32Array, num_steps: int) -> None:
        """So many steps have passed in which nothing was tried."""
        kept = KEPT**num_steps
        self._right_NK[slots_Q] *= kept
        self._tried_NK[slots_Q] *= kept
        self._all_right_K *= kept
        self._all_tried_K *= kept

    def survival(self, slots_Q: Int32Array) -> FloatArray:
        """[Q, K]: how likely it is that a draft and all before it are right."""
        num_tried, num_right = self._all_tried_K.sum(), self._all_right_K.sum()
        rate = (num_right + self._first_right) / (num_tried + self._first_weight)
        all_K = (self._all_right_K + OTHERS_WEIGHT * rate) / (self._all_tried_K + OTHERS_WEIGHT)
        right_QK = self._right_NK[slots_Q] + OTHERS_WEIGHT * all_K
        rate_QK = right_QK / (self._tried_NK[slots_Q] + OTHERS_WEIGHT)
        survival_QK: FloatArray = np.cumprod(rate_QK, axis=1)
        return survival_QK

    def least_tried(self, slots_Q: Int32Array) -> Int32Array:
        """The rows in the order of how little is known of them."""
        order: Int32Array = np.argsort(self._tried_NK[slots_Q, 0], kind="stable").astype(np.int32)
        return order
