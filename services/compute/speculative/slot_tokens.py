"""The tokens of every slot that drafts: those it came with, and those it went on with.

Shape legend: N slots, L positions.
"""

from __future__ import annotations

import numpy as np

from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.step import NO_IDS, Int32Array, Int64Array


class SlotTokens:
    """Kept where drafts are made, so that the host sends none of them again."""

    def __init__(self, num_slots: int, max_positions: int) -> None:
        self._ids_NL = np.zeros((num_slots, max_positions + 1), dtype=np.int32)
        self._num_ids = [0] * num_slots  # 0: the slot does not draft

    def enter(self, entry: SlotEntry) -> Int32Array:
        """A sequence takes its slot; returns its tokens, none if it does not draft."""
        ids = np.concatenate((entry.prompt_ids, entry.output_ids)) if entry.drafts else NO_IDS
        self._ids_NL[entry.slot, : len(ids)] = ids
        self._num_ids[entry.slot] = len(ids)
        return ids

    def count(self, slot: int) -> int:
        """How many tokens a slot's sequence has; 0 if it does not draft."""
        return self._num_ids[slot]

    def room(self, slot: int) -> Int32Array:
        """A slot's tokens and what is behind them."""
        ids_L: Int32Array = self._ids_NL[slot]
        return ids_L

    def at(self, slots_T: Int64Array, positions_T: Int64Array) -> Int64Array:
        """Tokens of slots at positions."""
        ids_T: Int64Array = self._ids_NL[slots_T, positions_T].astype(np.int64)
        return ids_T

    def guess(self, slots_P: Int64Array, positions_P: Int64Array, ids_P: Int64Array) -> None:
        """Have guesses at positions behind the tokens of slots, until these go on."""
        self._ids_NL[slots_P, positions_P] = ids_P

    def append(self, slot: int, tokens: list[int]) -> int:
        """Take what a slot's sequence went on with; returns how many tokens it has now."""
        start = self._num_ids[slot]
        end = min(start + len(tokens), self._ids_NL.shape[1])
        self._ids_NL[slot, start:end] = tokens[: end - start]
        self._num_ids[slot] = end
        return end
