"""Placement in turn, whatever the load."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.placement import Candidate


class RoundRobin:
    """Gives each service's workers one request after another."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, service: str, candidates: Sequence[Candidate]) -> int:
        """Return the index of the candidate whose turn it is."""
        turn = self._turns.get(service, 0)
        self._turns[service] = turn + 1
        return turn % len(candidates)
