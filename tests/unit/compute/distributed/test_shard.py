"""Which part of a model each rank has: together they are the whole, and none is empty."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import tests.cases  # noqa: F401
from common.errors import ConfigError
from services.compute.distributed.shard import WHOLE, HeadPart, Shard

SIZES = st.integers(1, 9)


def parts_of(count: int, size: int) -> list[range]:
    return [Shard(rank, size).part(count) for rank in range(size)]


def heads_of(num_heads: int, num_kv_heads: int, size: int) -> list[HeadPart]:
    return [Shard(rank, size).heads(num_heads, num_kv_heads) for rank in range(size)]


def joined(parts: list[range]) -> list[int]:
    return [number for part in parts for number in part]


@given(count=st.integers(1, 20_000), size=SIZES)
def test_parts_are_a_width_in_order_and_none_is_empty(count: int, size: int) -> None:
    assume(count >= size)
    parts = parts_of(count, size)
    assert joined(parts) == [*range(count)]
    assert all(parts)


@pytest.mark.parametrize(
    ("width", "size", "widths"),
    [
        (14336, 2, [7168] * 2),  # Llama 3 8B
        (18944, 4, [4736] * 4),  # Qwen2.5 7B
        (768, 4, [192] * 4),  # an expert of Qwen3-30B-A3B: units of 64, since 128 make 256 of one
        (2880, 4, [736, 736, 704, 704]),  # gpt-oss: whole groups of 32 in MXFP4
        (128_256, 8, [16_032] * 8),
        (11_008, 4, [2752] * 4),
        (50, 4, [14, 12, 12, 12]),
        (7, 4, [2, 2, 2, 1]),
    ],
)
def test_parts_are_of_the_unit_that_makes_the_largest_one_smallest(
    width: int, size: int, widths: list[int]
) -> None:
    assert [len(part) for part in parts_of(width, size)] == widths


@given(num_kv_heads=st.integers(1, 16), group=st.integers(1, 9), size=SIZES)
def test_each_query_is_of_one_rank_that_has_its_kv_head(
    num_kv_heads: int, group: int, size: int
) -> None:
    num_heads = num_kv_heads * group
    assume(num_heads >= size)
    parts = heads_of(num_heads, num_kv_heads, size)
    assert joined([part.queries for part in parts]) == [*range(num_heads)]
    for part in parts:
        assert len(part.queries) % len(part.kv) == 0
        own_group = len(part.queries) // len(part.kv)
        for number, query in enumerate(part.queries):
            assert part.kv[number // own_group] == query // group
    counted = [part.kv for part in parts if part.counts_kv]
    assert joined(counted) == [*range(num_kv_heads)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "queries", "kv"),
    [
        (32, 8, 2, [16, 16], [4, 4]),
        (6, 3, 2, [4, 2], [2, 1]),
        (8, 2, 4, [2, 2, 2, 2], [1, 1, 1, 1]),
        (6, 2, 3, [2, 1, 3], [1, 1, 1]),
        (128, 1, 2, [64, 64], [1, 1]),  # latents
    ],
)
def test_ranks_share_a_kv_head_only_where_there_are_too_few(
    num_heads: int, num_kv_heads: int, size: int, queries: list[int], kv: list[int]
) -> None:
    parts = heads_of(num_heads, num_kv_heads, size)
    assert [len(part.queries) for part in parts] == queries
    assert [len(part.kv) for part in parts] == kv


def test_one_rank_has_all() -> None:
    assert WHOLE.part(1000) == range(1000)
    assert WHOLE.heads(8, 2) == HeadPart(range(8), range(2), 8, 2)


def test_more_ranks_than_a_width_has_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a width of 7.* lower it"):
        Shard(0, 8).part(7)


@given(num_layers=st.integers(1, 80), count=st.integers(1, 8))
def test_each_layer_is_of_one_stage_and_none_is_idle(num_layers: int, count: int) -> None:
    assume(num_layers >= count)
    stages = [Shard(stage=number, num_stages=count) for number in range(count)]
    parts = [stage.layers(num_layers) for stage in stages]
    assert joined(parts) == [*range(num_layers)]
    assert {len(part) - num_layers // count for part in parts} <= {0, 1}
    assert [stage.is_first for stage in stages] == [True] + [False] * (count - 1)
    assert [stage.is_last for stage in stages] == [False] * (count - 1) + [True]
