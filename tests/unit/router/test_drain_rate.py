"""The rate at which a queue drains, and what it says to those who find it full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.drain_rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, DrainRate

AMOUNTS = st.one_of(st.just(0.0), st.floats(0.001, 1e6))


def draining(per_s: float, seconds: float, amount: float = 1.0) -> DrainRate:
    """Return the rate of a queue that has drained steadily from 0 s on."""
    rate = DrainRate()
    for number in range(round(per_s * seconds)):
        rate.left(number / per_s, amount)
    return rate


@pytest.mark.parametrize(("per_s", "expected_s"), [(0.05, 20.0), (0.25, 4.0), (0.5, 2.0)])
def test_a_place_comes_as_fast_as_others_came(per_s: float, expected_s: float) -> None:
    assert draining(per_s, 100.0).wait_s(100.0) == pytest.approx(expected_s, rel=0.35)


def test_many_places_take_longer_and_large_requests_free_more() -> None:
    assert draining(10.0, 60.0).wait_s(60.0, 200.0) == pytest.approx(20.0, rel=0.1)
    assert draining(10.0, 60.0, amount=4.0).wait_s(60.0, 200.0) == pytest.approx(5.0, rel=0.1)


def test_what_leaves_at_once_is_not_taken_for_a_rate_without_end() -> None:
    rate = DrainRate()
    for _ in range(100):
        rate.left(50.0)
    assert rate.wait_s(50.0, 400.0) == pytest.approx(4.0)


def test_what_drains_nothing_is_expected_to_go_on_like_that() -> None:
    rate = DrainRate()
    assert [rate.wait_s(now_s) for now_s in (100.0, 105.0, 130.0, 500.0)] == [1.0, 5.0, 30.0, 60.0]
    rate.left(500.0)
    assert rate.wait_s(501.0) == 1.0


def test_a_rate_of_more_than_a_minute_ago_says_nothing() -> None:
    rate = draining(100.0, 10.0)
    assert rate.wait_s(1000.0) == MIN_RETRY_AFTER_S
    assert rate.wait_s(1020.0) == 20.0


def test_what_leaves_without_taking_anything_off_drains_nothing() -> None:
    rate = DrainRate()
    rate.left(100.0, 0.0)
    assert rate.time_s(101.0, 5.0) is None
    assert [rate.wait_s(now_s, 5.0) for now_s in (101.0, 121.0)] == [1.0, 20.0]


@given(st.lists(st.tuples(st.floats(0.0, 30.0), AMOUNTS), max_size=80), AMOUNTS, AMOUNTS)
def test_a_wait_is_bounded_and_grows_with_what_is_wanted(
    history: list[tuple[float, float]], amount: float, more: float
) -> None:
    rate, now_s = DrainRate(), 100.0
    for gap_s, each in history:
        now_s += gap_s
        rate.left(now_s, each)
    waits = [rate.wait_s(now_s, amount), rate.wait_s(now_s, amount + more)]
    assert MIN_RETRY_AFTER_S <= waits[0] <= waits[1] <= MAX_RETRY_AFTER_S
