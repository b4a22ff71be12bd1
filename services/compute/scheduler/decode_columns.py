"""The columns of the decode rows, kept from step to step."""

from __future__ import annotations

import numpy as np

from services.compute.scheduler.sequence import Sequence
from services.compute.step import DEVICE_TOKEN, Int32Array


def int32_array(values: list[int]) -> Int32Array:
    """Pack a list of integers."""
    return np.array(values, dtype=np.int32)


class DecodeColumns:
    """While the rows are the same list as in the step before, a step costs two additions of
    arrays, whatever their length; what does not change is the same array in many plans."""

    __slots__ = (
        "_device_tokens",
        "_next_start",
        "_rows",
        "_to_index",
        "_used_in",
        "epoch",
        "index",
        "one",
        "row",
        "slot",
        "start",
        "stop",
        "tokens",
    )

    def __init__(self) -> None:
        none = int32_array([])
        self._rows: list[Sequence] = []
        self._used_in = -1  # the step in which these rows were used last
        self._device_tokens = self._next_start = self._to_index = none
        self.slot = self.epoch = self.one = self.row = none
        self.start = self.stop = self.index = self.tokens = none

    def advance(self, rows: list[Sequence], step_id: int, oldest_in_flight: int) -> None:
        """Make the columns those of step `step_id`, for which `rows` count as launched."""
        if rows is not self._rows:
            self._set_rows(rows)
        elif self._used_in < oldest_in_flight:
            self.tokens = self._known_tokens()
        else:
            self.tokens = self._device_tokens
        self.start = self._next_start
        self.stop = self._next_start = self.start + 1
        self.index = self.start + self._to_index
        self._used_in = step_id

    def _set_rows(self, rows: list[Sequence]) -> None:
        num_rows = len(rows)
        self._rows = rows
        self.slot = int32_array([s.slot for s in rows])
        self.epoch = int32_array([s.epoch for s in rows])
        self.one = np.ones(num_rows, dtype=np.int32)
        self.row = np.arange(num_rows, dtype=np.int32)
        self._next_start = int32_array([s.launched - 1 for s in rows])
        self._to_index = int32_array([1 - s.prompt_len for s in rows])
        self._device_tokens = np.full(num_rows, DEVICE_TOKEN, dtype=np.int32)
        self.tokens = self._known_tokens()

    def _known_tokens(self) -> Int32Array:
        """The rows' input tokens as far as the host has them; `launched` counts this step."""
        return int32_array(
            [
                DEVICE_TOKEN if s.launched > s.prompt_len + len(s.outputs) else s.outputs[-1]
                for s in self._rows
            ]
        )
