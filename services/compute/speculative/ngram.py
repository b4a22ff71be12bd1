"""Drafts from texts: what the client predicts, and what followed the last tokens where they stood
before.

As long as the answer is what was predicted, the prediction is followed. Where it is not, prompt,
answer and prediction are looked through (prompt lookup: Saxena, 2023): of the places where the last
token stands, too, the one with most tokens alike before it is taken; of several the next one in the
prediction, and else the last. No weights are read for it.

A slot has room for the longest text. The prediction lies at its end, where the answer may grow over
what it has passed.

Shape legend: N slots, L positions, M matches, K drafts of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from services.compute.kernels.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.speculative.settings import NGRAM, PREDICTION, SpeculativeSettings
from services.compute.speculative.slot_tokens import SlotTokens
from services.compute.step import NO_IDS, Int32Array, Int64Array


class Stand(NamedTuple):
    """Where an answer stands in its prediction."""

    start: int  # where the prediction begins
    place: int  # of its token that was the answer's last one, when it was followed last
    follows: bool


class NgramDrafter:
    """Looks up drafts as soon as it is known what they follow; `kernels.draft_tokens` is the same
    on a GPU."""

    def __init__(self, num_slots: int, max_positions: int, settings: SpeculativeSettings) -> None:
        self._settings = settings
        self._tokens = SlotTokens(num_slots, max_positions)
        self._stands = [Stand(max_positions + 1, max_positions, False)] * num_slots
        self._most, self._is_synthetic = settings.max_drafts, settings.is_synthetic
        self._gram_bytes = 4 * settings.prompt_lookup_min
        # By which most tokens are done: what never stood before is not looked for (2 us, not 20).
        self._grams: list[set[bytes]] = [set() for _ in range(num_slots)]

    @property
    def computes(self) -> bool:
        return False

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ids = self._tokens.enter(entry)
        ids_L, predicted = self._tokens.room(entry.slot), entry.prediction_ids
        start = len(ids_L) - len(predicted)
        ids_L[start:] = predicted
        self._stands[entry.slot] = Stand(start, start - 1, len(predicted) > 0)
        self._grams[entry.slot] = {*self._grams_of(ids), *self._grams_of(predicted)}

    def extend(self, slot: int, tokens: Int32Array) -> tuple[Int32Array, int]:
        """Append what a slot's sequence went on with; return the drafts for what follows, and which
        of DRAFTERS they are from."""
        start = self._tokens.count(slot)
        if not start:
            return NO_IDS, NGRAM
        ids_L, most = self._tokens.room(slot), self._most
        stand = self._stands[slot]
        if stand.follows:
            stand = follow(ids_L, tokens, stand)
        end = self._tokens.append(slot, tokens)
        last = end - 1
        if self._is_synthetic:
            return np.repeat(ids_L[last], most), NGRAM
        stood_before = self._remember(slot, ids_L, start, end)
        place = stand.place if stand.follows else -1
        if stood_before and not stand.follows:
            place = find(ids_L, last, stand, self._settings)
        is_predicted = place > last
        self._stands[slot] = Stand(stand.start, place, True) if is_predicted else stand
        if place < 0:
            return NO_IDS, NGRAM
        stop = len(ids_L) if is_predicted else end
        drafts = ids_L[place + 1 : min(place + 1 + most, stop)].copy()
        return drafts, PREDICTION if is_predicted else NGRAM

    def _remember(self, slot: int, ids_L: Int32Array, start: int, end: int) -> bool:
        """Take the grams that end in places start .. end; whether the last of them is not new."""
        grams, size = self._grams[slot], self._gram_bytes // 4
        stood_before = start == end
        for stop in range(max(start + 1, size), end + 1):
            gram = ids_L[stop - size : stop].tobytes()
            stood_before = gram in grams
            grams.add(gram)
        return stood_before

    def _grams_of(self, ids: Int32Array) -> list[bytes]:
        """Each run of so many tokens as have to be alike."""
        size, data = self._gram_bytes, ids.tobytes()
        return [data[first : first + size] for first in range(0, len(data) + 1 - size, 4)]

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


def follow(ids_L: Int32Array, tokens: Int32Array, stand: Stand) -> Stand:
    """Where an answer stands that goes on with these tokens, which may be about to take the places
    of what they are compared with."""
    place = stand.place + len(tokens)
    if place < len(ids_L) - 1 and np.array_equal(ids_L[stand.place + 1 : place + 1], tokens):
        return stand._replace(place=place)
    return stand._replace(follows=False)


def find(ids_L: Int32Array, last: int, stand: Stand, settings: SpeculativeSettings) -> int:
    """The place from which a text goes on that may go on so from `last`, too; -1 for none."""
    least, length = settings.prompt_lookup_min, len(ids_L)
    if last + 1 < least:
        return -1
    first = max(stand.start, last + 1)
    ends_M = _alike(ids_L, last, least, 0, last)
    if first < length:
        ends_M = np.concatenate((ends_M, _alike(ids_L, last, least, first, length - 1)))
    if not len(ends_M):
        return -1
    floor_M = np.where(ends_M > last, first, 0)
    alike_M = np.full(len(ends_M), least)
    for back in range(least, min(settings.prompt_lookup_max, last + 1)):
        is_alike = (alike_M == back) & (ends_M - back >= floor_M)
        alike_M += is_alike & (ids_L[np.maximum(ends_M - back, 0)] == ids_L[last - back])
    best_M = ends_M[alike_M == alike_M.max()]
    is_ahead_M = best_M > max(stand.place, last)
    return int(best_M[np.where(is_ahead_M, 2 * length - best_M, best_M).argmax()])


def _alike(ids_L: Int32Array, last: int, count: int, begin: int, stop: int) -> Int64Array:
    """Places in begin .. stop at which as many ids end alike as do at `last`."""
    begin += count - 1
    is_alike = ids_L[begin:stop] == ids_L[last]
    for back in range(1, count):
        is_alike &= ids_L[begin - back : max(stop, begin) - back] == ids_L[last - back]
    return begin + np.flatnonzero(is_alike)
