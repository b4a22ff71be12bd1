"""How far the pages of running sequences reach, as uploads say.

Shape legend: N slots, P of those.
"""

from __future__ import annotations

import numpy as np

from services.compute.kernels.step.step_buffers import GROUP_SHIFT
from services.compute.runner.uploads import StepUpload
from services.compute.step import Int64Array


class PageRoom:
    """For a drafter that writes behind what a plan has rows for."""

    def __init__(self, num_slots: int, page_tokens: int, max_positions: int, group: int) -> None:
        self._num_N = np.zeros(num_slots, dtype=np.int64)  # positions
        self._page_tokens, self._max_positions, self._group = page_tokens, max_positions, group

    def follow(self, step: StepUpload) -> None:
        self._num_N[step.slot_rows()[:, 0]] = 0
        page_slot = step.section("page_slot")
        own = page_slot >> GROUP_SHIFT == self._group
        slots = page_slot[own] & ((1 << GROUP_SHIFT) - 1)
        ends = (step.section("page_index")[own] + 1) * self._page_tokens
        np.maximum.at(self._num_N, slots, np.minimum(ends, self._max_positions))

    def behind(self, slots_P: Int64Array, positions_P: Int64Array) -> Int64Array:
        """How many positions behind these have pages, too."""
        num_P: Int64Array = np.maximum(self._num_N[slots_P] - 1 - positions_P, 0)
        return num_P
