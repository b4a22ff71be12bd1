"""Placement by load: where the smallest share of the capacity is in use."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement import Candidate


class LeastLoad:
    """Gives a request to the least loaded worker; equally loaded ones take turns.

    Without the turns an idle fleet would send everything to its first worker, whose prefix cache
    and power would be the only ones used.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, service: str, candidates: Sequence[Candidate]) -> int:
        """Return the index of the candidate with the smallest load over capacity."""
        shares = [each.load / max(1, each.capacity) for each in candidates]
        least = min(shares)
        tied = [index for index, share in enumerate(shares) if share == least]
        turn = self._turns.get(service, 0)
        self._turns[service] = turn + 1
        return tied[turn % len(tied)]
