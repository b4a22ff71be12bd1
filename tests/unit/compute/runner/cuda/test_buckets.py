"""Graphs are captured for sizes that waste little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.runner.cuda.buckets import bucket_of, row_buckets, token_buckets


def test_small_steps_have_sizes_of_their_own() -> None:
    assert row_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert token_buckets(50) == (16, 32, 48, 50)


@given(st.integers(1, 2048), st.data())
def test_every_number_of_rows_has_the_smallest_bucket_that_holds_it(most: int, data) -> None:
    buckets = row_buckets(most)
    size = data.draw(st.integers(1, most))
    bucket = bucket_of(size, buckets)
    assert size <= bucket <= most
    assert not any(size <= other < bucket for other in buckets)


@given(st.integers(1, 20_000), st.data())
def test_padding_of_large_steps_is_an_eighth_at_most(most: int, data) -> None:
    size = data.draw(st.integers(1, most))
    bucket = bucket_of(size, token_buckets(most))
    assert bucket - size < max(32, size / 8)


@given(st.integers(1, 20_000))
def test_buckets_rise_to_the_largest_size(most: int) -> None:
    for buckets in (row_buckets(most), token_buckets(most)):
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == most


def test_what_no_bucket_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is more than the largest captured size, 8"):
        bucket_of(9, row_buckets(8))
