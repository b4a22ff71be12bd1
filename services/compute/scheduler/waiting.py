"""Who runs next: the waiting queue, fair between clients by the tokens computed for them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.compute.scheduler.sequence import Sequence
from services.compute.shares import ClientShare


class WaitingQueue:
    """Sequences that wait to run, for the first time or again after a preemption.

    A lower priority number goes first (as in vLLM), then what goes on from a lost worker, then the
    client whose turn it is, then the earlier arrival.
    """

    def __init__(self) -> None:
        self._floor = 0  # the counter of the client that was the last to leave
        self._lines: dict[int, dict[ClientShare, list[tuple[int, Sequence]]]] = {}
        self._num_waiting = 0
        self.num_resumable = 0  # of those here, how many have run before
        self.num_going_on = 0  # and how many another worker had begun

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for lines in self._lines.values():
            for line in lines.values():
                yield from (sequence for _, sequence in line)

    def add(self, sequence: Sequence) -> None:
        priority, arrival = sequence.order
        share = sequence.share
        if not sequence.has_run and not any(share in lines for lines in self._lines.values()):
            share.join((other for lines in self._lines.values() for other in lines), self._floor)
        lines = self._lines.setdefault(priority, {})
        insort(lines.setdefault(sequence.share, []), (arrival, sequence), key=_arrival)
        self._num_waiting += 1
        self.num_resumable += sequence.has_run
        self.num_going_on += sequence.params.goes_on

    def remove(self, sequence: Sequence) -> None:
        priority, arrival = sequence.order
        lines = self._lines.get(priority, {})
        line = lines.get(sequence.share, [])
        at = bisect_left(line, arrival, key=_arrival)
        if at == len(line) or line[at][1] is not sequence:
            raise RuntimeError(f"{sequence.attempt} does not wait")
        del line[at]
        self._floor = sequence.share.tokens
        if not line:
            del lines[sequence.share]
        if not lines:
            del self._lines[priority]
        self._num_waiting -= 1
        self.num_resumable -= sequence.has_run
        self.num_going_on -= sequence.params.goes_on

    def first(self, allow_new: bool, goes_on: bool = True) -> Sequence | None:
        """The next one to run; with `allow_new` unset, of those that have run before.

        With `goes_on` unset, of those that no other worker had begun.
        """
        if not (self._num_waiting if allow_new else self.num_resumable):
            return None
        head = _head if allow_new else _resumable
        for priority in sorted(self._lines):
            lines = self._lines[priority].values()
            heads = map(head, lines if goes_on else map(_begun_here, lines))
            first = min(filter(None, heads), key=_turn, default=None)
            if first is not None:
                return first
        return None

    def places(self, num_open: int, count: int) -> list[Sequence]:
        """Up to `count` sequences of clients that keep more than `num_open` open ones without them.

        The latest of those with the most; none of a request that a client reads already.
        """
        lines: dict[ClientShare, list[Sequence]] = {}
        for sequence in sorted(self, key=_order):
            if not sequence.params.begun:
                lines.setdefault(sequence.share, []).append(sequence)
        left = {share: share.num_open for share in lines}
        places: list[Sequence] = []
        while len(places) < count and left:
            share = max(left, key=left.__getitem__)
            if left[share] <= num_open or not lines[share]:
                del left[share]
                continue
            places.append(lines[share].pop())
            left[share] -= 1
        return places


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _arrival(entry: tuple[int, Sequence]) -> int:
    return entry[0]


def _turn(sequence: Sequence) -> tuple[bool, int, int, int]:
    return *sequence.turn, sequence.order[1]


def _begun_here(line: list[tuple[int, Sequence]]) -> list[tuple[int, Sequence]]:
    return line[bisect_left(line, 0, key=_arrival) :]  # those of others come first in each line


def _head(line: list[tuple[int, Sequence]]) -> Sequence | None:
    return line[0][1] if line else None


def _resumable(line: list[tuple[int, Sequence]]) -> Sequence | None:
    return next((sequence for _, sequence in line if sequence.has_run), None)
