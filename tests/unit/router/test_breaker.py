"""Circuit breakers: replicas that fail are left alone for a while, then probed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    MAX_REPLICAS,
    CircuitBreakers,
    LeftAlone,
)

HERE, THERE = "mem://compute", "mem://compute2"


def tripped(now_s: float = 100.0) -> CircuitBreakers:
    breakers = CircuitBreakers()
    for _ in range(MAX_FAILURES):
        assert breakers.allows(HERE, now_s)
        breakers.failed(HERE, now_s, "hung")
    return breakers


def test_a_replica_is_left_alone_after_failures_in_a_row_and_no_other_one_is() -> None:
    breakers = tripped()
    assert not breakers.allows(HERE, 100.0)
    assert not breakers.allows(HERE, 99.9 + FIRST_PAUSE_S)
    assert breakers.allows(THERE, 100.0)


def test_a_success_between_failures_begins_the_count_again() -> None:
    breakers = CircuitBreakers()
    for _ in range(5):
        for _ in range(MAX_FAILURES - 1):
            breakers.failed(HERE, 100.0, "hung")
        breakers.succeeded(HERE)
    assert breakers.allows(HERE, 100.0)


def test_after_the_pause_one_request_is_a_probe_that_decides() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    assert breakers.allows(HERE, now_s)
    breakers.placed(HERE, now_s)
    assert not breakers.allows(HERE, now_s + 1.0)
    breakers.succeeded(HERE)
    assert breakers.allows(HERE, now_s + 1.0)


def test_a_probe_that_fails_doubles_the_pause() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    breakers.placed(HERE, now_s)
    breakers.failed(HERE, now_s, "hung")
    assert not breakers.allows(HERE, now_s + 1.9 * FIRST_PAUSE_S)
    assert breakers.allows(HERE, now_s + 2.0 * FIRST_PAUSE_S)


def test_a_probe_of_which_nothing_is_heard_is_followed_by_another() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    breakers.placed(HERE, now_s)
    assert breakers.allows(HERE, now_s + FIRST_PAUSE_S)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0)), max_size=60))
def test_no_replica_is_left_alone_for_ever(history: list[tuple[bool, float]]) -> None:
    breakers, now_s = CircuitBreakers(), 0.0
    for failed, gap_s in history:
        now_s += gap_s
        if failed:
            breakers.failed(HERE, now_s, "hung")
        elif breakers.allows(HERE, now_s):
            breakers.placed(HERE, now_s)
    assert breakers.allows(HERE, now_s + LONGEST_PAUSE_S)


def test_it_remembers_a_bounded_number_of_replicas() -> None:
    breakers = CircuitBreakers()
    for number in range(2 * MAX_REPLICAS):
        for _ in range(MAX_FAILURES):
            breakers.failed(f"mem://{number}", 100.0, "hung")
    assert breakers.allows("mem://0", 100.0)
    assert not breakers.allows(f"mem://{2 * MAX_REPLICAS - 1}", 100.0)


def test_who_is_left_alone_can_be_seen_with_why_and_for_how_long() -> None:
    breakers = tripped()
    breakers.failed(THERE, 100.0, "dead")
    assert breakers.left_alone(101.0) == [LeftAlone(HERE, MAX_FAILURES, "hung", FIRST_PAUSE_S - 1)]
    now_s = 200.0
    assert [each.for_s for each in breakers.left_alone(now_s)] == [0.0], "the next one is a probe"
    breakers.placed(HERE, now_s)
    breakers.failed(HERE, now_s, "internal_error")
    (again,) = breakers.left_alone(now_s)
    assert (again.why, again.num_failures) == ("internal_error", MAX_FAILURES + 1)
    breakers.succeeded(HERE)
    assert breakers.left_alone(now_s) == []


def test_beginning_and_end_are_told_once_however_many_failures_there_are() -> None:
    breakers = tripped()
    for _ in range(10):
        breakers.failed(HERE, 101.0, "dead")
    assert breakers.changes() == [LeftAlone(HERE, MAX_FAILURES, "hung", FIRST_PAUSE_S)]
    breakers.succeeded(HERE)
    breakers.failed(THERE, 102.0, "dead")
    breakers.succeeded(THERE)
    assert breakers.changes() == [LeftAlone(HERE, 0, "", 0.0)]
    assert breakers.changes() == []
