"""The two placement policies."""

from __future__ import annotations

from collections import Counter

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
def test_least_load_never_passes_over_a_less_loaded_worker(
    candidates: list[PlacementCandidate],
) -> None:
    chosen = candidates[LeastLoad().choose("compute", candidates)]
    share = chosen.load / max(1, chosen.capacity)
    assert all(share <= each.load / max(1, each.capacity) for each in candidates)


@given(workers, st.integers(1, 20))
def test_round_robin_stays_in_range_when_workers_come_and_go(
    candidates: list[PlacementCandidate], times: int
) -> None:
    policy = RoundRobin()
    for number in range(times):
        some = candidates[: 1 + number % len(candidates)]
        assert 0 <= policy.choose("compute", some) < len(some)
