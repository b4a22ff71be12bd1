"""The tokens of every slot that drafts: those it came with, and those it went on with.

Shape legend: N slots, L positions.
"""

from __future__ import annotations

import numpy as np

from services.compute.kernels.slot_entries import SlotEntry
from services.compute.step import NO_IDS, Int32Array


class SlotTokens:
    """Kept where drafts are made, so that the host sends none of them again."""

    def __init__(self, num_slots: int, max_positions: int) -> None:
        self._ids_NL = np.zeros((num_slots, max_positions + 1), dtype=np.int32)
        self._num_ids = np.zeros(num_slots, dtype=np.int64)  # 0: the slot does not draft

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ids = np.concatenate((entry.prompt_ids, entry.output_ids)) if entry.drafts else NO_IDS
        self._ids_NL[entry.slot, : len(ids)] = ids
        self._num_ids[entry.slot] = len(ids)

    def extend(self, slot: int, tokens: Int32Array) -> Int32Array:
        """Append what a slot's sequence went on with; return all of it, nothing if it does not
        draft."""
        start = int(self._num_ids[slot])
        if not start:
            return NO_IDS
        end = min(start + len(tokens), self._ids_NL.shape[1])
        self._ids_NL[slot, start:end] = tokens[: end - start]
        self._num_ids[slot] = end
        ids_L: Int32Array = self._ids_NL[slot, :end]
        return ids_L

    def between(self, slot: int, start: int, end: int) -> Int32Array:
        """Those at the positions start .. end."""
        ids: Int32Array = self._ids_NL[slot, start:end]
        return ids
