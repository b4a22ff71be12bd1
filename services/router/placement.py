"""Which worker of a service gets the next request: the policies that a setting chooses from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ABOUT_AS_SOON = 1.5  # measured times of equal machines differ by less


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A worker that could take the request.

    `load` counts the requests there: those in the worker's last heartbeat, and those that this
    router has placed since. `step_s` is how long it takes for a token of one more; 0 is unknown.
    """

    instance_id: str
    load: int
    capacity: int
    step_s: float = 0.0

    @property
    def share(self) -> float:
        """What it would use of its capacity with one more."""
        return (self.load + 1) / max(1, self.capacity)


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
    """Chooses the worker that uses the smallest share of its capacity, equal ones round robin.

    Of computes only those are asked that are expected to end a request first, or about then. Where
    one is full, a request waits for others to end: that time counts.
    """

    def __init__(self) -> None:
        # By load alone an idle fleet would send every request to its first worker, and use only
        # that one's prefix cache and power.
        self._equals = RoundRobin()

    def choose(self, service: str, candidates: Sequence[PlacementCandidate]) -> int:
        near = _soonest(candidates)
        least = min(candidates[index].share for index in near)
        tied = [index for index in near if candidates[index].share == least]
        return tied[self._equals.choose(service, [candidates[index] for index in tied])]


def _soonest(candidates: Sequence[PlacementCandidate]) -> list[int]:
    """Return who would end a request soonest; who has not been measured is taken for as fast."""
    fastest_s = min((each.step_s for each in candidates if each.step_s), default=1.0)
    times_s = [(each.step_s or fastest_s) * max(1.0, each.share) for each in candidates]
    most_s = ABOUT_AS_SOON * min(times_s)
    return [index for index, time_s in enumerate(times_s) if time_s <= most_s]


PLACEMENTS: dict[str, Callable[[], Placement]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
}
