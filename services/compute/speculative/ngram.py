"""Drafts from the text itself: what followed the last tokens where they stood before.

Prompt lookup (Saxena, 2023): of the places in a sequence where its last token stood before, the one
with most tokens alike before it is taken, and of several the last. No weights are read for it.

Shape legend: N slots, L positions, M matches.
"""

from __future__ import annotations

import numpy as np

from services.compute.kernels.slot_entries import SlotEntry
from services.compute.speculative.settings import SpeculativeSettings
from services.compute.step import NO_IDS, Int32Array


class NgramDrafter:
    """Keeps the tokens of every slot that drafts; `kernels.draft_tokens` is the same on a GPU."""

    def __init__(self, num_slots: int, max_positions: int, settings: SpeculativeSettings) -> None:
        self._settings = settings
        self._ids_NL = np.zeros((num_slots, max_positions + 1), dtype=np.int32)
        self._num_ids = np.zeros(num_slots, dtype=np.int64)  # 0: the slot does not draft

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ids = np.concatenate((entry.prompt_ids, entry.output_ids)) if entry.drafts else NO_IDS
        self._ids_NL[entry.slot, : len(ids)] = ids
        self._num_ids[entry.slot] = len(ids)

    def extend(self, slot: int, tokens: Int32Array) -> Int32Array:
        """Append what a slot's sequence went on with; return the drafts for what follows."""
        start = int(self._num_ids[slot])
        if not start:
            return NO_IDS
        end = min(start + len(tokens), self._ids_NL.shape[1])
        self._ids_NL[slot, start:end] = tokens[: end - start]
        self._num_ids[slot] = end
        ids_L = self._ids_NL[slot, :end]
        if self._settings.is_synthetic:
            return np.repeat(ids_L[-1:], self._settings.max_drafts)
        return draft(ids_L, self._settings)


def draft(ids_L: Int32Array, settings: SpeculativeSettings) -> Int32Array:
    """Guess what follows these tokens; empty where too few of the last ones stood before."""
    last = len(ids_L) - 1
    ends_M = np.flatnonzero(ids_L[:last] == ids_L[last])
    alike_M = np.ones(len(ends_M), dtype=np.int64)
    for back in range(1, settings.prompt_lookup_max):
        is_alike = (alike_M == back) & (ends_M >= back) & (last >= back)
        is_alike &= ids_L[np.maximum(ends_M - back, 0)] == ids_L[max(last - back, 0)]
        alike_M += is_alike
    if not len(ends_M) or alike_M.max() < settings.prompt_lookup_min:
        return NO_IDS
    best = int(ends_M[np.flatnonzero(alike_M == alike_M.max())[-1]])
    return ids_L[best + 1 : best + 1 + settings.max_drafts].copy()
