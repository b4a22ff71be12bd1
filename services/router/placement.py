"""Which worker of a service gets the next request: the policies that a setting chooses from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A worker that could take the request.

    `load` counts the requests there: those in the worker's last heartbeat, and those that this
    router has placed since.
    """

    instance_id: str
    load: int
    capacity: int


class Placement(Protocol):
    """A pure policy, which may remember its own choices and nothing else."""

    def choose(self, service: str, candidates: Sequence[PlacementCandidate]) -> int:
        """Return the index of the chosen candidate; there is at least one."""
        ...


class RoundRobin:
    """Gives each service's workers one request after another, whatever their load."""

    def __init__(self) -> None:
        self._num_chosen: dict[str, int] = {}

    def choose(self, service: str, candidates: Sequence[PlacementCandidate]) -> int:
        number = self._num_chosen.get(service, 0)
        self._num_chosen[service] = number + 1
        return number % len(candidates)


class LeastLoad:
    """Chooses the worker that uses the smallest share of its capacity, equal ones round robin."""

    def __init__(self) -> None:
        # By load alone an idle fleet would send every request to its first worker, and use only
        # that one's prefix cache and power.
        self._equals = RoundRobin()

    def choose(self, service: str, candidates: Sequence[PlacementCandidate]) -> int:
        shares = [candidate.load / max(1, candidate.capacity) for candidate in candidates]
        least = min(shares)
        tied = [index for index, share in enumerate(shares) if share == least]
        return tied[self._equals.choose(service, [candidates[index] for index in tied])]


PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
}
