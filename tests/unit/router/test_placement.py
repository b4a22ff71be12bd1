"""The two placement policies."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement import LeastLoad, PlacementCandidate, RoundRobin

workers = st.lists(
    st.builds(PlacementCandidate, st.just("x"), st.integers(0, 100), st.integers(0, 100)),
    min_size=1,
)


def test_round_robin_gives_each_its_turn_service_by_service() -> None:
    policy = RoundRobin()
    three = [PlacementCandidate(name, 0, 1) for name in "abc"]
    assert [policy.choose("compute", three) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [policy.choose("tokenizer", three[:2]) for _ in range(3)] == [0, 1, 0]


def test_least_load_counts_load_against_capacity() -> None:
    candidates = [
        PlacementCandidate("small", 2, 4),
        PlacementCandidate("large", 10, 100),
        PlacementCandidate("full", 9, 9),
    ]
    assert LeastLoad().choose("compute", candidates) == 1


def test_equally_loaded_workers_take_turns() -> None:
    policy = LeastLoad()
    candidates = [
        PlacementCandidate("a", 0, 8),
        PlacementCandidate("b", 0, 8),
        PlacementCandidate("c", 4, 8),
    ]
    chosen = Counter(policy.choose("compute", candidates) for _ in range(10))
    assert chosen == {0: 5, 1: 5}


@given(workers)
def test_least_load_never_passes_over_a_less_loaded_worker_that_is_as_fast(
    candidates: list[PlacementCandidate],
) -> None:
    chosen = candidates[LeastLoad().choose("compute", candidates)]
    assert all(chosen.share <= each.share for each in candidates)


def test_a_worker_that_was_not_measured_counts_as_fast_as_the_fastest() -> None:
    slow, new = PlacementCandidate("slow", 0, 8, 0.1), PlacementCandidate("new", 0, 8)
    fast = PlacementCandidate("fast", 1, 8, 0.01)
    assert LeastLoad().choose("compute", [slow, new, fast]) == 1


class Machine:
    """A compute with so many places, which takes as long for a step whatever runs in it."""

    def __init__(self, step_s: float, capacity: int = 8) -> None:
        self.step_s = step_s
        self.capacity = capacity
        self.running: list[list[float]] = []  # when each came, and the tokens that it lacks
        self.waiting: list[list[float]] = []
        self.latencies_s: list[float] = []
        self.next_s = 0.0

    def turn(self, now_s: float) -> None:
        """Make the steps until now."""
        while self.next_s <= now_s:
            for request in self.running:
                request[1] -= 1
            ended = [came_s for came_s, lacks in self.running if not lacks]
            self.latencies_s += [self.next_s - came_s for came_s in ended]
            self.running = [request for request in self.running if request[1]]
            while self.waiting and len(self.running) < self.capacity:
                self.running.append(self.waiting.pop(0))
            self.next_s += self.step_s

    def candidate(self, is_measured: bool) -> PlacementCandidate:
        load = len(self.running) + len(self.waiting)
        return PlacementCandidate("x", load, self.capacity, self.step_s if is_measured else 0.0)


def _simulated(is_measured: bool, per_s: float) -> tuple[list[int], float]:
    """How many requests of 50 tokens each of two machines got, and the 95th percentile of all."""
    policy, draws = LeastLoad(), random.Random(7)
    machines = [Machine(0.02), Machine(0.08)]
    counts, now_s = [0, 0], 0.0
    while now_s < 300.0:
        now_s += draws.expovariate(per_s)
        for machine in machines:
            machine.turn(now_s)
        chosen = policy.choose("compute", [each.candidate(is_measured) for each in machines])
        machines[chosen].waiting.append([now_s, 50.0])
        counts[chosen] += 1
    latencies_s = sorted(machines[0].latencies_s + machines[1].latencies_s)
    return counts, latencies_s[int(0.95 * len(latencies_s))]


@pytest.mark.parametrize("per_s", [7.0, 9.5])
def test_of_two_computes_the_faster_one_gets_more_and_requests_end_sooner(per_s: float) -> None:
    (fast, slow), p95_s = _simulated(True, per_s)
    _, unmeasured_s = _simulated(False, per_s)
    assert fast >= 4 * slow
    assert p95_s < unmeasured_s


@given(workers, st.integers(1, 20))
def test_round_robin_stays_in_range_when_workers_come_and_go(
    candidates: list[PlacementCandidate], times: int
) -> None:
    policy = RoundRobin()
    for number in range(times):
        some = candidates[: 1 + number % len(candidates)]
        assert 0 <= policy.choose("compute", some) < len(some)
