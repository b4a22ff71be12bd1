"""Where the last tokens of a text stood before, in it or in what the client predicts.

Most tokens make a pair that never stood before, which takes one look into a table to know. Places
of a pair that did are linked from each to the one before, so that none is searched for: that would
take 20 us a row, of a step that takes a small model a hundred times as much.

Shape legend: L positions, T tokens of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from common.speculative import SpeculativeSettings
from services.compute.step import Int32Array, Int64Array

MOST_IN_GRAM = 2  # tokens by which places are found; more that have to be alike are compared
MOST_PLACES = 256  # that are looked at, the last ones
NOWHERE = -1


class Stand(NamedTuple):
    """Where an answer stands in its prediction."""

    start: int  # where the prediction begins
    place: int  # of its token that was the answer's last one, when it was followed last
    follows: bool


class _Links:
    """Places of grams, from each to the one before."""

    def __init__(self) -> None:
        self.last: dict[int, int] = {}  # by gram
        self.before: dict[int, int] = {}  # by place

    def add(self, gram: int, place: int) -> int:
        """Returns the last place until now, or NOWHERE."""
        before = self.last.get(gram, NOWHERE)
        self.last[gram] = place
        if before >= 0:
            self.before[place] = before
        return before

    def back_from(self, place: int) -> Iterator[int]:
        while place >= 0:
            yield place
            place = self.before.get(place, NOWHERE)


class GramPlaces:
    """The places of a slot's grams, which are tokens or pairs of them, by their last tokens."""

    def __init__(self, ids_L: Int32Array, size: int) -> None:
        """`ids_L`: the slot's tokens, and at its end the prediction."""
        self._ids_L = ids_L.data
        self._kept = (1 << 32 * (size - 1)) - 1  # bits of the token before that count
        self._size = size
        self._text, self._predicted = _Links(), _Links()
        self._count = 0
        self._last = NOWHERE, NOWHERE  # where the last gram stood before in text and prediction

    def begin(self, start: int, count: int) -> None:
        """A text of so many tokens takes the slot, with a prediction from `start` on."""
        self._text, self._predicted = _Links(), _Links()
        self._take_all(self._text, 0, count)
        self._take_all(self._predicted, start, len(self._ids_L) - 1)  # nothing follows the last
        self._count = count

    def take(self, end: int) -> bool:
        """Take the tokens up to `end`; returns whether the gram of the last one is not new."""
        ids_L, text = self._ids_L, self._text
        for last in range(max(self._count, self._size - 1), end):
            gram = (ids_L[last - 1] & self._kept) << 32 | ids_L[last]
            self._last = text.add(gram, last), self._predicted.last.get(gram, NOWHERE)
        self._count = end
        return self._last != (NOWHERE, NOWHERE)

    def best(self, stand: Stand, settings: SpeculativeSettings) -> int:
        """The place from which the text may go on as from its last token: that with most tokens
        alike before it; of several the next in the prediction, and else the last. Or NOWHERE."""
        last, most = self._count - 1, min(settings.prompt_lookup_max, self._count)
        in_text, predicted = self._last
        best, best_alike = NOWHERE, settings.prompt_lookup_min - 1
        for place in islice(self._text.back_from(in_text), MOST_PLACES):
            alike = self._alike(place, last, most, 0)
            if alike > best_alike:
                best, best_alike = place, alike
                if alike == most:
                    break
        first, ahead, best_rank = max(stand.start, last + 1), max(stand.place, last), 0
        for place in islice(self._predicted.back_from(predicted), MOST_PLACES):
            if place < first:  # the answer has grown over it
                break
            alike = self._alike(place, last, most, first)
            rank = 2 * len(self._ids_L) - place if place > ahead else place
            if alike > best_alike or (alike == best_alike and rank > best_rank):
                best, best_alike, best_rank = place, alike, rank
        return best

    def _alike(self, place: int, last: int, most: int, floor: int) -> int:
        """How many tokens up to one place are those up to the other."""
        ids_L, alike = self._ids_L, 0
        while alike < most and place - alike >= floor:
            if ids_L[place - alike] != ids_L[last - alike]:
                break
            alike += 1
        return alike

    def _take_all(self, links: _Links, begin: int, end: int) -> None:
        """As if they were added to empty links one by one."""
        grams: Int64Array = np.asarray(self._ids_L[begin:end]).astype(np.int64)
        if self._size > 1:
            grams = grams[:-1] << 32 | grams[1:]
        places = np.arange(len(grams)) + (begin + self._size - 1)
        links.last = dict(zip(grams.tolist(), places.tolist(), strict=True))
        order = np.argsort(grams, kind="stable")
        again = np.flatnonzero(grams[order[1:]] == grams[order[:-1]])
        later, earlier = places[order[again + 1]].tolist(), places[order[again]].tolist()
        links.before = dict(zip(later, earlier, strict=True))
