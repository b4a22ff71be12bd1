"""Histograms: every value is in one bucket, the one whose upper bound it does not exceed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.request_stats import (
    FIRST_TOKEN_S,
    INTER_TOKEN_S,
    REQUEST_S,
    TOKENS,
    Histogram,
)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 7.5


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(0, 100))))
def test_a_weight_is_as_many_observations(values: list[tuple[float, int]]) -> None:
    weighted, single = Histogram(REQUEST_S), Histogram(REQUEST_S)
    for value, weight in values:
        weighted.observe(value, weight)
        for _ in range(weight):
            single.observe(value)
    assert weighted.counts == single.counts


def test_bounds_grow() -> None:
    for bounds in (FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, TOKENS):
        assert list(bounds) == sorted(set(bounds))
