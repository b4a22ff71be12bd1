"""Circuit breakers: replicas that fail are left alone for a while, then tried."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.breaker import (
    FIRST_PAUSE_S,
    FORGET_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    MAX_REPLICAS,
    CircuitBreakers,
    LeftAlone,
)

HERE, THERE = "mem://compute", "mem://compute2"


def tripped(now_s: float = 100.0) -> CircuitBreakers:
    breakers = CircuitBreakers()
    fail(breakers, HERE, now_s)
    return breakers


def fail(breakers: CircuitBreakers, endpoint: str, until_s: float) -> None:
    """Let a replica fail often enough, the last time at `until_s`."""
    for number in range(MAX_FAILURES):
        assert breakers.allows(endpoint, until_s)
        breakers.failed(endpoint, until_s - (MAX_FAILURES - 1 - number), "hung")


def test_a_replica_is_left_alone_after_failures_in_a_row_and_no_other_one_is() -> None:
    breakers = tripped()
    assert not breakers.allows(HERE, 100.0)
    assert not breakers.allows(HERE, 99.9 + FIRST_PAUSE_S)
    assert breakers.allows(THERE, 100.0)


def test_a_success_between_failures_begins_the_count_again() -> None:
    breakers = CircuitBreakers()
    for turn in range(5):
        for number in range(MAX_FAILURES - 1):
            breakers.failed(HERE, 100.0 * turn + number, "hung")
        breakers.succeeded(HERE)
    assert breakers.allows(HERE, 100.0)


def test_after_the_pause_one_request_is_a_trial_that_decides() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    assert breakers.allows(HERE, now_s)
    breakers.placed(HERE, now_s)
    assert not breakers.allows(HERE, now_s + 1.0)
    breakers.succeeded(HERE)
    assert breakers.allows(HERE, now_s + 1.0)


def test_a_trial_that_fails_doubles_the_pause() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    breakers.placed(HERE, now_s)
    breakers.failed(HERE, now_s, "hung")
    assert not breakers.allows(HERE, now_s + 1.9 * FIRST_PAUSE_S)
    assert breakers.allows(HERE, now_s + 2.0 * FIRST_PAUSE_S)


def test_a_trial_of_which_nothing_is_heard_is_followed_by_another() -> None:
    breakers = tripped()
    now_s = 100.0 + FIRST_PAUSE_S
    breakers.placed(HERE, now_s)
    assert breakers.allows(HERE, now_s + FIRST_PAUSE_S)


def test_the_rows_of_one_broken_step_are_one_failure() -> None:
    breakers = CircuitBreakers()
    for number in range(20):
        breakers.failed(HERE, 100.0 + number * 0.004, "nonfinite_logits")
    assert breakers.allows(HERE, 100.1)
    fail(breakers, THERE, 100.0)
    now_s = 100.0 + FIRST_PAUSE_S
    breakers.placed(THERE, now_s)
    for _ in range(20):
        breakers.failed(THERE, now_s, "nonfinite_logits")
    assert breakers.allows(THERE, now_s + 2 * FIRST_PAUSE_S)


def test_what_fails_while_it_is_left_alone_says_only_why() -> None:
    breakers = tripped()
    for second in range(20):
        breakers.failed(HERE, 101.0 + second, "dead")
    assert breakers.left_alone(121.0) == [LeftAlone(HERE, MAX_FAILURES, "dead", 0.0)]
    assert breakers.allows(HERE, 100.0 + FIRST_PAUSE_S)


def test_a_replica_that_is_gone_for_good_is_forgotten() -> None:
    breakers = tripped()
    breakers.forget(100.0 + FORGET_S)
    assert breakers.left_alone(100.0 + FORGET_S)
    breakers.forget(101.0 + FORGET_S)
    assert breakers.left_alone(101.0 + FORGET_S) == []
    assert len(breakers.changes()) == 1, "nobody uses it again"


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
        fail(breakers, f"mem://{number}", 100.0)
    assert breakers.allows("mem://0", 100.0)
    assert not breakers.allows(f"mem://{2 * MAX_REPLICAS - 1}", 100.0)


def test_who_is_left_alone_can_be_seen_with_why_and_for_how_long() -> None:
    breakers = tripped()
    breakers.failed(THERE, 100.0, "dead")
    assert breakers.left_alone(101.0) == [LeftAlone(HERE, MAX_FAILURES, "hung", FIRST_PAUSE_S - 1)]
    now_s = 200.0
    assert [each.for_s for each in breakers.left_alone(now_s)] == [0.0], "the next one is a trial"
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
