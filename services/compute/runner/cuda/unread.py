"""How much of each slot's text a drafter has not read, at most: what says how large its launches
are. The device has the exact numbers, and the host no result of a step when it launches the next.

Shape legend: N slots, R rows, Q decode rows, D those of Q that are drafted for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from services.compute.kernels.step.slot_words import MOST_PLAIN
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_KEPT_ROWS,
    NUM_ROWS,
    NUMBER_SHIFT,
    SLOT_MASK,
)
from services.compute.runner.uploads import StepUpload
from services.compute.step import NO_IDS, Int32Array


class DraftWork(NamedTuple):
    """What a step's drafts take."""

    num_read: int  # tokens of the launch that reads first; 0: there is none
    num_slots: tuple[int, ...]  # that get a first draft, a second …
    num_rows: int  # of the first pass, and of all that read


class FirstPass(NamedTuple):
    """Which tokens of a slot it has, besides the last one."""

    others: int  # that come before, where what lies behind them is read first
    most_rows: int = 0  # of a drafter that reads its own drafts again: all that it has not read,
    # where these of all slots are no more; 0: its drafts count as read, as far as they were right
    reads: bool = True  # False: it keeps nothing of a text, and has one row of each slot
    num_layers: int = 1  # each of which has a pass with its rows, and drafts more


NOTHING = DraftWork(0, (), 0)


class Unread:
    """Follows uploads.

    A row without drafts advances its slot by a token at most, which is read when drafts are wanted:
    then all but the last ones are read first, and those with the first pass. That leaves one, if
    all drafts are right; or each that was right, of a drafter that reads them again.
    """

    def __init__(
        self, num_slots: int, launch_of: Callable[[int], int], first: FirstPass, num_drafts: int
    ) -> None:
        """`launch_of` so many tokens, at most, is the size of the launch that reads them; slots
        behind what it holds wait for the next step. Before a swap a row's `num_drafts` and
        MOST_PLAIN tokens may not have been read."""
        self._launch_of = launch_of
        self._first, self._num_new = first, num_drafts + MOST_PLAIN
        self._num_N = np.zeros(num_slots, dtype=np.int64)
        self._rows: Int32Array = NO_IDS  # of the step before

    def follow(self, step: StepUpload) -> DraftWork:
        """Take a step; returns what is to be launched before its pass."""
        header = step.header
        self._num_N[step.slot_rows()[:, 0]] = self._num_new
        if not header[NUM_ROWS]:
            return NOTHING
        kept = self._rows[: header[NUM_KEPT_ROWS]]
        self._rows = np.concatenate((kept, step.section("row_slot")))
        slots_R, num_decodes = self._rows & SLOT_MASK, header[NUM_DECODE_ROWS]
        self._num_N[slots_R[num_decodes:]] = 0  # chunks are read with their step
        slots_Q, numbers_Q = slots_R[:num_decodes], self._rows[:num_decodes] >> NUMBER_SHIFT
        if not numbers_Q.any():
            self._num_N[slots_Q] += 1
            return NOTHING
        firsts = np.flatnonzero(numbers_Q == 0)
        slots_Q, num_drafts_Q = slots_Q[firsts], np.diff(firsts, append=num_decodes) - 1
        given = step.drafts()[0] & SLOT_MASK
        is_drafted_Q = (num_drafts_Q > 0) & ~np.isin(slots_Q, given)
        self._num_N[slots_Q[~is_drafted_Q]] += 1 + num_drafts_Q[~is_drafted_Q]
        depths_D = num_drafts_Q[is_drafted_Q]
        num_read, num_rows = self._read(slots_Q[is_drafted_Q], depths_D)
        passes = range(int(depths_D.max(initial=0)))
        num_slots = tuple(int((depths_D > number).sum()) for number in passes)
        return DraftWork(num_read, num_slots, num_rows)

    def _read(self, slots_D: Int32Array, depths_D: Int32Array) -> tuple[int, int]:
        """Read up to what the first pass has, in the order of the rows as the device does; returns
        how many at most, in one launch, and the rows of the first pass."""
        others, most_rows, reads, num_layers = self._first
        if not reads:
            return 0, len(slots_D)
        new_D = depths_D if most_rows else 1  # unread when the drafts have been verified
        num_ahead = int(np.minimum(depths_D, num_layers).sum()) - len(slots_D)
        num_rows = int(self._num_N[slots_D].sum()) + len(slots_D) + num_ahead
        if num_rows <= most_rows:
            self._num_N[slots_D] = new_D
            return 0, num_rows
        unread_D = np.maximum(self._num_N[slots_D] - others, 0)
        total = int(unread_D.sum())
        size = self._launch_of(total) if total else 0
        left_D = np.clip(np.cumsum(unread_D) - size, 0, unread_D)
        # Who is not drafted for goes on by one token; the device may have had less to read.
        not_drafted_D = np.where(left_D > 0, left_D + others + 1, 0)
        self._num_N[slots_D] = np.maximum(not_drafted_D, new_D)
        return size, (1 + others) * len(slots_D) + num_ahead
