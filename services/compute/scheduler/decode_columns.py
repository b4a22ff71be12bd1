"""The columns of the decode rows, kept from step to step."""

from __future__ import annotations

import numpy as np

from services.compute.scheduler.sequence import Sequence
from services.compute.step import DEVICE_TOKEN, Int32Array, int32_array

_TAKEN = -1  # a step that has been taken long ago


class DecodeColumns:
    """Packs decode rows from arrays that are kept by slot, so that a step costs a few gathers
    instead of a walk over its sequences.

    While the rows are the same list as in the step before, as they are most of the time, even
    their slots need no packing. Arrays may be shared by several plans: they are never written to.
    """

    __slots__ = (
        "_device_tokens",
        "_epoch_of",
        "_guided_of",
        "_index_of",
        "_num_guided",
        "_rows",
        "_start_of",
        "_step_of",
        "epoch",
        "guided",
        "index",
        "one",
        "row",
        "slot",
        "start",
        "stop",
        "tokens",
    )

    def __init__(self, num_slots: int) -> None:
        self._rows: list[Sequence] = []
        self._start_of = np.zeros(num_slots, dtype=np.int32)  # the position that comes next
        self._index_of = np.zeros(num_slots, dtype=np.int32)  # output index less position
        self._epoch_of = np.zeros(num_slots, dtype=np.int32)
        self._step_of = np.zeros(num_slots, dtype=np.int64)  # the last step with a row of it
        self._guided_of = np.zeros(num_slots, dtype=np.bool_)
        self._num_guided = 0  # slots whose last owner was guided
        self.guided: tuple[int, ...] = ()
        none = int32_array([])
        self.slot = self.epoch = self.one = self.row = self._device_tokens = none
        self.start = self.stop = self.index = self.tokens = none

    def begin(self, sequence: Sequence, step_id: int) -> None:
        """A sequence samples its first token in this step; from the next on it decodes."""
        slot = sequence.slot
        self._start_of[slot] = sequence.launched
        self._index_of[slot] = 1 - sequence.prompt_len
        self._epoch_of[slot] = sequence.epoch
        self._step_of[slot] = step_id
        guided = sequence.params.guided
        if guided != self._guided_of[slot]:
            self._guided_of[slot] = guided
            self._num_guided += 1 if guided else -1

    def take_back(self, sequence: Sequence) -> None:
        """The row that a sequence has in the step packed last draws nothing: pack it again."""
        slot = sequence.slot
        self._start_of[slot] -= 1
        self._step_of[slot] = _TAKEN

    def advance(self, rows: list[Sequence], step_id: int, oldest_in_flight: int) -> None:
        """Make the columns those of step `step_id`; steps before `oldest_in_flight` are taken."""
        if rows is not self._rows:
            self._set_rows(rows)
        slot = self.slot
        self.tokens = self._tokens(oldest_in_flight)
        self.start = self._start_of[slot]
        self.stop = self.start + 1
        self.index = self.start + self._index_of[slot]
        self._start_of[slot] = self.stop
        self._step_of[slot] = step_id

    def _set_rows(self, rows: list[Sequence]) -> None:
        num_rows = len(rows)
        self._rows = rows
        self.slot = int32_array([sequence.slot for sequence in rows])
        self.epoch = self._epoch_of[self.slot]
        self.one = np.ones(num_rows, dtype=np.int32)
        self.row = np.arange(num_rows, dtype=np.int32)
        self._device_tokens = np.full(num_rows, DEVICE_TOKEN, dtype=np.int32)
        self.guided = ()
        if self._num_guided:
            self.guided = tuple(np.flatnonzero(self._guided_of[self.slot]).tolist())

    def _tokens(self, oldest_in_flight: int) -> Int32Array:
        """The input tokens of rows whose last step has been taken; others are on the device."""
        known = self._step_of[self.slot] < oldest_in_flight
        if not known.any():
            return self._device_tokens
        rows, tokens = self._rows, self._device_tokens.copy()
        for row in np.flatnonzero(known).tolist():
            tokens[row] = rows[row].last_id
        return tokens
