"""The waiting line: sequences without a slot, by priority and then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.compute.scheduler.sequence import Sequence


class WaitingLine:
    """Sequences that wait to run, for the first time or again after a preemption.

    A lower priority number goes first (as in vLLM). A preempted sequence comes back to the place
    that its arrival gives it. A plain sorted list: with the thousand entries that are let in, an
    insertion costs about a microsecond.
    """

    __slots__ = ("_entries", "num_joined")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Sequence]] = []
        self.num_joined = 0  # of those here, how many have run before

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._entries)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence stand where its priority and arrival put it."""
        insort(self._entries, (*sequence.order, sequence))
        self.num_joined += sequence.joined

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands; it must be here."""
        at = bisect_left(self._entries, sequence.order)
        if at == len(self._entries) or self._entries[at][2] is not sequence:
            raise RuntimeError(f"{sequence.attempt} does not wait")
        del self._entries[at]
        self.num_joined -= sequence.joined

    def first(self, newcomers: bool) -> Sequence | None:
        """The next one to run; without newcomers, the next of those that have run before."""
        if newcomers:
            return self._entries[0][2] if self._entries else None
        if not self.num_joined:
            return None
        return next(sequence for sequence in self if sequence.joined)
