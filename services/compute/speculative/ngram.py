"""Drafts from texts: what the client predicts, and what followed the last tokens where they stood
before.

As long as the answer is what was predicted, the prediction is followed. Where it is not, prompt,
answer and prediction are looked through (prompt lookup: Saxena, 2023): of the places where the last
token stands, too, the one with most tokens alike before it is taken; of several the next one in the
prediction, and else the last. No weights are read for it.

A slot has room for the longest text. The prediction lies at its end, where the answer may grow over
what it has passed.

Shape legend: N slots, L positions, M matches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.compute.kernels.slot_entries import SlotEntry
from services.compute.speculative.settings import NGRAM, PREDICTION, SpeculativeSettings
from services.compute.step import NO_IDS, Int32Array


class Stand(NamedTuple):
    """Where an answer stands in its prediction."""

    start: int  # where the prediction begins
    place: int  # of its token that was the answer's last one, when it was followed last
    follows: bool


class NgramDrafter:
    """Keeps the tokens of every slot that drafts; `kernels.draft_tokens` is the same on a GPU."""

    def __init__(self, num_slots: int, max_positions: int, settings: SpeculativeSettings) -> None:
        self._settings = settings
        self._ids_NL = np.zeros((num_slots, max_positions + 1), dtype=np.int32)
        self._num_ids = np.zeros(num_slots, dtype=np.int64)  # 0: the slot does not draft
        self._stands = [Stand(max_positions + 1, max_positions, False)] * num_slots

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ids = np.concatenate((entry.prompt_ids, entry.output_ids)) if entry.drafts else NO_IDS
        ids_L, predicted = self._ids_NL[entry.slot], entry.prediction_ids
        start = len(ids_L) - len(predicted)
        ids_L[: len(ids)], ids_L[start:] = ids, predicted
        self._num_ids[entry.slot] = len(ids)
        self._stands[entry.slot] = Stand(start, start - 1, len(predicted) > 0)

    def extend(self, slot: int, tokens: Int32Array) -> tuple[Int32Array, int]:
        """Append what a slot's sequence went on with; return the drafts for what follows, and which
        of DRAFTERS they are from."""
        start = int(self._num_ids[slot])
        if not start:
            return NO_IDS, NGRAM
        ids_L, most = self._ids_NL[slot], self._settings.max_drafts
        stand = follow(ids_L, tokens, self._stands[slot])
        end = min(start + len(tokens), len(ids_L))
        ids_L[start:end] = tokens[: end - start]
        self._num_ids[slot] = end
        last = end - 1
        if self._settings.is_synthetic:
            return np.repeat(ids_L[last], most), NGRAM
        place = stand.place if stand.follows else find(ids_L, last, stand, self._settings)
        is_predicted = place > last
        if is_predicted:
            stand = Stand(stand.start, place, True)
        self._stands[slot] = stand
        stop = len(ids_L) if is_predicted else end
        drafts = ids_L[place + 1 : min(place + 1 + most, stop)].copy() if place >= 0 else NO_IDS
        return drafts, PREDICTION if is_predicted else NGRAM


def follow(ids_L: Int32Array, tokens: Int32Array, stand: Stand) -> Stand:
    """Where an answer stands that goes on with these tokens, which may be about to take the places
    of what they are compared with."""
    place = stand.place + len(tokens)
    goes_on = stand.follows and place < len(ids_L) - 1
    if goes_on and np.array_equal(ids_L[stand.place + 1 : place + 1], tokens):
        return stand._replace(place=place)
    return stand._replace(follows=False)


def find(ids_L: Int32Array, last: int, stand: Stand, settings: SpeculativeSettings) -> int:
    """The place from which a text goes on that may go on so from `last`, too; -1 for none."""
    first = max(stand.start, last + 1)
    in_text_M = np.flatnonzero(ids_L[:last] == ids_L[last])
    ends_M = np.concatenate((in_text_M, first + np.flatnonzero(ids_L[first:-1] == ids_L[last])))
    floor_M = np.where(ends_M > last, first, 0)
    alike_M = np.ones(len(ends_M), dtype=np.int64)
    for back in range(1, settings.prompt_lookup_max):
        is_alike = (alike_M == back) & (ends_M - back >= floor_M) & (last >= back)
        is_alike &= ids_L[np.maximum(ends_M - back, 0)] == ids_L[max(last - back, 0)]
        alike_M += is_alike
    if not len(ends_M) or alike_M.max() < settings.prompt_lookup_min:
        return -1
    is_ahead_M = ends_M > max(stand.place, last)
    rank_M = np.where(is_ahead_M, 2 * len(ids_L) - ends_M, ends_M)
    best_M = np.flatnonzero(alike_M == alike_M.max())
    return int(ends_M[best_M[rank_M[best_M].argmax()]])


def draft(ids_L: Int32Array, settings: SpeculativeSettings) -> Int32Array:
    """Guess what follows these tokens; empty where too few of the last ones stood before."""
    length = len(ids_L)
    place = find(ids_L, length - 1, Stand(length, length - 1, False), settings)
    return ids_L[place + 1 : place + 1 + settings.max_drafts].copy() if place >= 0 else NO_IDS
