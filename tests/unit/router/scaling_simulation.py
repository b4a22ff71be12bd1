"""A service in a queueing model: replicas of a measured capacity that come late, under a curve."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.scaling import Observation, Scaler, ScalingSettings, ServicePool
from tests.unit.router.load_curves import INTERVAL_S

SYNC_S = 15  # HorizontalPodAutoscaler's and KEDA's loop
CAPACITY_PER_S = 4.0  # requests of one replica
BASE_S = 0.3  # to the first token, where nothing waits
POOL = ServicePool("m", "compute")
MOST = 16


@dataclass
class Simulated:
    """What happened: replicas each second, and how late the first token was for how many."""

    replicas: list[int] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # seconds, requests
    directions: list[int] = field(default_factory=list)  # +1 and -1, as the engine was told

    def first_token_s(self, share: float) -> float:
        left = share * sum(count for _, count in self.waits)
        for wait_s, count in sorted(self.waits):
            left -= count
            if left <= 0:
                return BASE_S + wait_s
        return math.inf

    @property
    def num_turns(self) -> int:
        """How often scaling up was followed by scaling down, or the other way round."""
        pairs = zip(self.directions, self.directions[1:], strict=False)
        return sum(before != after for before, after in pairs)


def simulate(rates: Sequence[float], delay_s: int, settings: ScalingSettings) -> Simulated:
    """Run a curve against the policy; a new replica serves `delay_s` after the engine asked."""
    scaler, seen, ready, wanted = Scaler(settings), Simulated(), 1, 1
    starting: deque[int] = deque()  # when each will be ready
    queue, use = 0.0, 0.0
    for now_s in range(int(len(rates) * INTERVAL_S)):
        while starting and starting[0] <= now_s:
            starting.popleft()
            ready += 1
        arrived = rates[int(now_s / INTERVAL_S)]
        wait_s = queue / (ready * CAPACITY_PER_S)
        seen.waits.append((wait_s, arrived))
        served = min(queue + arrived, ready * CAPACITY_PER_S)
        queue += arrived - served
        use += (served / (ready * CAPACITY_PER_S) - use) * -math.expm1(-1 / 5.0)
        waits_s = queue / CAPACITY_PER_S
        scaler.observe(float(now_s), {POOL: Observation(ready, ready * use, waits_s)})
        if now_s % SYNC_S == 0:
            before, wanted = wanted, min(MOST, max(1, scaler.desired(POOL)))
            if wanted != before:
                seen.directions.append(1 if wanted > before else -1)
            while wanted > ready + len(starting):
                starting.append(now_s + delay_s)
            while wanted < ready + len(starting):
                if starting:
                    starting.pop()
                else:
                    ready -= 1
        seen.replicas.append(ready)
    return seen
