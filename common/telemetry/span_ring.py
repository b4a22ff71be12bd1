"""The last spans of one kind in one process, kept for a timeline, not for a request's trace."""

from __future__ import annotations

import struct
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from math import nan

from common.messages.queries import TimelinePart, TimelineQuery, Track, TrackArg

CAPACITY = 8192


class SpanRing:
    """A ring of (begin, end, numbers); noting a span takes half a microsecond."""

    def __init__(self, lane: str, name: str, *args: str, capacity: int = CAPACITY) -> None:
        self._lane = lane
        self._name = name
        self._args = args
        self._row = struct.Struct(f"{2 + len(args)}d")
        self._data = bytearray(struct.pack("d", nan) * ((2 + len(args)) * capacity))
        self._at = 0

    def note(self, began_s: float, ended_s: float, *values: float) -> None:
        """Note a span that ends now, with a value for each argument's name."""
        self._row.pack_into(self._data, self._at, began_s, ended_s, *values)
        self._at += self._row.size
        if self._at == len(self._data):
            self._at = 0

    def track(self, since_s: float) -> Track:
        """Return the spans that ended at this time or later, oldest first."""
        rows = array("d", bytes(self._data[self._at :] + self._data[: self._at]))
        step = 2 + len(self._args)
        columns = [rows[place::step] for place in range(step)]
        ended_s = columns[1]
        # The places at the beginning that were never written hold NaN.
        unwritten = next((at for at, end_s in enumerate(ended_s) if end_s == end_s), len(ended_s))
        first = bisect_left(ended_s, since_s, lo=unwritten)
        began_s, ended_s, *values = (column[first:] for column in columns)
        args = tuple(TrackArg(*arg) for arg in zip(self._args, values, strict=True))
        return Track(self._lane, self._name, began_s, ended_s, args)


def timeline_part(
    query: TimelineQuery, clock: Callable[[], float], tracks: Iterable[Track]
) -> TimelinePart:
    """Answer a query with tracks on that clock."""
    return TimelinePart(query.query, time.time() - clock(), tuple(tracks))
