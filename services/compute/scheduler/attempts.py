"""The register of attempts: open ones by router, and those aborted before they came."""

from __future__ import annotations

from collections.abc import Iterator

from common.messages.address import AttemptId
from services.compute.scheduler.sequence import Sequence
from services.compute.scheduler.tombstones import Tombstones


class OpenAttempts:
    """Every sequence that has not had its terminal yet."""

    __slots__ = ("_by_router", "tombstones")

    def __init__(self, tombstones: Tombstones) -> None:
        self.tombstones = tombstones
        self._by_router: dict[str, dict[int, Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._by_router.values())

    def __bool__(self) -> bool:
        return bool(self._by_router)

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_router.values():
            yield from sequences.values()

    def get(self, attempt: AttemptId) -> Sequence | None:
        """The sequence of this attempt, if it is open."""
        return self._by_router.get(attempt.router, {}).get(attempt.counter)

    def add(self, sequence: Sequence) -> None:
        """Open an attempt."""
        attempt = sequence.attempt
        self._by_router.setdefault(attempt.router, {})[attempt.counter] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Close an attempt; a router without any is forgotten."""
        attempt = sequence.attempt
        sequences = self._by_router[attempt.router]
        del sequences[attempt.counter]
        if not sequences:
            del self._by_router[attempt.router]

    def counters(self, router: str) -> list[int]:
        """The open attempts of one router."""
        return list(self._by_router.get(router, ()))
