"""Drafts from texts: what the client predicts, and what followed the last tokens where they stood
before.

As long as the answer is what was predicted, the prediction is followed. Where it is not, prompt,
answer and prediction are looked through (prompt lookup: Saxena, 2023): of the places where the last
token stands, too, the one with most tokens alike before it is taken; of several the next one in the
prediction, and else the last. No weights are read for it.

A slot has room for the longest text. The prediction lies at its end, where the answer may grow over
what it has passed.

Shape legend: N slots, L positions, K drafts of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from common.speculative import SpeculativeSettings
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.speculative.draft_counts import NGRAM, PREDICTION
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.speculative.gram_places import MOST_IN_GRAM, NOWHERE, GramPlaces, Stand
from services.compute.speculative.slot_tokens import SlotTokens
from services.compute.step import NO_IDS, Int32Array, Int64Array


class NgramDrafter:
    """Looks up drafts as soon as it is known what they follow; `kernels.drafts.draft_tokens` is the
    same on a GPU."""

    def __init__(self, num_slots: int, max_positions: int, settings: SpeculativeSettings) -> None:
        self._settings = settings
        self._tokens = SlotTokens(num_slots, max_positions)
        self._stands = [Stand(max_positions + 1, max_positions, False)] * num_slots
        self._most, self._is_synthetic = settings.max_drafts, settings.is_synthetic
        size = min(settings.prompt_lookup_min, MOST_IN_GRAM)
        self._grams = [GramPlaces(self._tokens.room(slot), size) for slot in range(num_slots)]

    @property
    def computes(self) -> bool:
        return False

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ids = self._tokens.enter(entry)
        ids_L, predicted = self._tokens.room(entry.slot), entry.prediction_ids
        start = len(ids_L) - len(predicted)
        ids_L[start:] = predicted
        self._stands[entry.slot] = Stand(start, start - 1, len(predicted) > 0)
        if not self._is_synthetic:
            self._grams[entry.slot].begin(start, len(ids))

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        """Append what a slot's sequence went on with; return the drafts for what follows, and which
        of DRAFTERS they are from."""
        if not self._tokens.count(slot):
            return NO_IDS, NGRAM
        ids_L, most = self._tokens.room(slot), self._most
        stand = self._stands[slot]
        if stand.follows:
            stand = follow(ids_L, tokens, stand)
        end = self._tokens.append(slot, tokens)
        last = end - 1
        if self._is_synthetic:
            return np.repeat(ids_L[last], most), NGRAM
        grams = self._grams[slot]
        stood_before = grams.take(end)
        place = stand.place if stand.follows else NOWHERE
        if stood_before and not stand.follows:
            place = grams.best(stand, self._settings)
        is_predicted = place > last
        self._stands[slot] = Stand(stand.start, place, True) if is_predicted else stand
        if place < 0:
            return NO_IDS, NGRAM
        stop = len(ids_L) if is_predicted else end
        drafts = ids_L[place + 1 : min(place + 1 + most, stop)].copy()
        return drafts, PREDICTION if is_predicted else NGRAM

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        return ()

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[object]
    ) -> Iterable[bool]:
        return ()

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        return ()

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        pass


def follow(ids_L: Int32Array, tokens: list[int], stand: Stand) -> Stand:
    """Where an answer stands that goes on with these tokens, which may be about to take the places
    of what they are compared with."""
    place = stand.place + len(tokens)
    if place < len(ids_L) - 1 and ids_L[stand.place + 1 : place + 1].tolist() == tokens:
        return stand._replace(place=place)
    return stand._replace(follows=False)
