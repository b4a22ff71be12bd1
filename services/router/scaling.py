"""How many replicas of each service are wanted; pure, given the clock.

The formula is the one of Kubernetes' HorizontalPodAutoscaler (use over target, a tolerance, windows
in both directions), with what waits counted as use.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """A service is to use `utilization` of its capacity, and to work off its queue in `drain_s`.

    More replicas are wanted once they were for `up_after_s`, fewer once no more were for
    `down_after_s`. A use that is off by less than the share `tolerance` changes nothing. A compute
    that had no request for `idle_s` is not wanted at all; with 0, one always is.
    """

    utilization: float = 0.7
    drain_s: float = 10.0
    down_after_s: float = 300.0
    idle_s: float = 0.0
    up_after_s: float = 8.0
    tolerance: float = 0.1


class ServicePool(NamedTuple):
    """The replicas of one service and one model; a router's have the model ""."""

    model: str
    service: str


@dataclass(frozen=True, slots=True)
class Observation:
    """A pool at one moment.

    `use` adds up what its replicas use of their capacities, from 0 to 1 each. `backlog_s` is what
    waits, in seconds of one replica; `places_lacking` what waits for a place, in replicas full of
    places. `num_held` requests wait for a first replica. Those of `num_ill` do not count.
    """

    replicas: int
    use: float = 0.0
    backlog_s: float = 0.0
    places_lacking: float = 0.0
    num_held: int = 0
    num_ill: int = 0
    is_busy: bool = True


@dataclass(slots=True)
class _PoolHistory:
    """What was wanted of a pool and when; the same number in a row is one entry."""

    desired: int
    since_s: float
    busy_at_s: float
    wanted: deque[tuple[float, int]] = field(default_factory=deque)  # from then on

    def note(self, now_s: float, count: int, keep_s: float) -> None:
        if not self.wanted or self.wanted[-1][1] != count:
            self.wanted.append((now_s, count))
        while len(self.wanted) > 1 and self.wanted[1][0] <= now_s - keep_s:
            self.wanted.popleft()

    def within(self, now_s: float, last_s: float) -> list[int]:
        """Return the numbers that were wanted at some time of the last seconds."""
        recent = [count for at_s, count in self.wanted if at_s > now_s - last_s]
        earlier = [count for at_s, count in self.wanted if at_s <= now_s - last_s]
        return [*earlier[-1:], *recent]


Observations: TypeAlias = Mapping[ServicePool, Observation]


class Scaler:
    """Decides from observations, which it gets about once a second."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._pools: dict[ServicePool, _PoolHistory] = {}

    def desired(self, pool: ServicePool) -> int:
        history = self._pools.get(pool)
        return 0 if history is None else history.desired

    def observe(self, now_s: float, observations: Observations) -> None:
        """Take what was seen of every pool; one that is not seen any more is forgotten."""
        self._pools = {pool: self._pools[pool] for pool in observations if pool in self._pools}
        for pool, seen in observations.items():
            history = self._pools.get(pool)
            if history is None:
                least = 0 if pool.service == "compute" and self._settings.idle_s else 1
                history = _PoolHistory(max(least, seen.replicas), now_s, now_s)
                self._pools[pool] = history
            self._decide(pool, history, seen, now_s)

    def _decide(
        self, pool: ServicePool, history: _PoolHistory, seen: Observation, now_s: float
    ) -> None:
        settings = self._settings
        if seen.is_busy or seen.num_held:
            history.busy_at_s = now_s
        may_sleep = pool.service == "compute" and settings.idle_s > 0
        if may_sleep and now_s - history.busy_at_s >= settings.idle_s:
            history.wanted.clear()
            history.desired = 0
            return
        if not history.desired and (seen.num_held or seen.is_busy):
            history.desired = 1  # at once: somebody waits
        if not history.desired:
            return
        count = seen.num_ill + self._wanted(history.desired - seen.num_ill, seen)
        history.note(now_s, count, max(settings.down_after_s, settings.up_after_s))
        if now_s - history.since_s >= settings.up_after_s:
            sustained = min(history.within(now_s, settings.up_after_s))
            history.desired = max(history.desired, sustained)
        highest = max(history.within(now_s, settings.down_after_s))
        history.desired = min(history.desired, highest)
        if now_s - history.since_s < settings.down_after_s:  # too little is known to want fewer
            history.desired = max(history.desired, seen.replicas + seen.num_ill)

    def _wanted(self, before: int, seen: Observation) -> int:
        """Return how many replicas this moment asks for, `before` if that is near enough."""
        settings = self._settings
        before = max(1, before)
        if not seen.replicas:
            return before  # one starts, and nothing can be measured
        use = seen.use + max(seen.backlog_s / settings.drain_s, seen.places_lacking)
        replicas = use / settings.utilization
        if replicas > before * (1.0 + settings.tolerance):
            return math.ceil(replicas)
        return max(1, min(before, math.ceil(replicas / (1.0 - settings.tolerance))))
