"""How much of the next weight a launch asks for."""

from __future__ import annotations

import pytest

from services.compute.layers.prefetch import MAX_ATTENTION_ROWS, MAX_ROWS, PrefetchLimits

LIMITS = PrefetchLimits(out_bytes=1 << 20, next_bytes=1 << 10)


@pytest.mark.parametrize("num_rows", [1, 2, MAX_ATTENTION_ROWS])
def test_beside_the_attention_of_few_rows_the_weight_behind_it_is_asked_for(num_rows: int) -> None:
    assert LIMITS.before_attention(num_rows) == 1 << 20


@pytest.mark.parametrize("num_rows", [MAX_ATTENTION_ROWS + 1, 4096])
def test_beside_the_attention_of_more_rows_nothing_is(num_rows: int) -> None:
    assert LIMITS.before_attention(num_rows) == 0


@pytest.mark.parametrize(("num_rows", "num_bytes"), [(1, 1 << 10), (MAX_ROWS, 1 << 10)])
def test_a_launch_before_a_product_of_few_rows_asks(num_rows: int, num_bytes: int) -> None:
    assert LIMITS.before_product(num_rows) == num_bytes


def test_a_launch_before_a_product_of_many_rows_does_not() -> None:
    assert LIMITS.before_product(MAX_ROWS + 1) == 0
