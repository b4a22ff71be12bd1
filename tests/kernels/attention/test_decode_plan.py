"""How decode attention is divided: as finely as its items allow, and only where it looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.kernels.attention.decode_plan import (
    CHUNK,
    LONG_CHUNK,
    ROW,
    SIZE,
    DecodeWork,
    plan_decode,
)
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, StepInputs
from tests.cases import num_cases


def test_pages_may_be_of_any_size(device: torch.device) -> None:
    inputs, work = inputs_of([500, 96], 4, device), DecodeWork.make(4, 200, 1, 16, device=device)
    plan_decode(inputs, work, 96, 2)  # pages do not bound chunks: 5 places for the two rows
    assert planned(work) == cut([500, 96], 256)


def test_rows_a_little_longer_than_a_power_of_two_are_cut_in_equal_parts(
    device: torch.device,
) -> None:
    lengths = [32_768 + 20 * row for row in range(16)]
    work = DecodeWork.make(16, 8, 4, 16, device=device)  # room for four parts of each row
    plan_decode(inputs_of(lengths, 16, device), work, 16, 16)
    assert planned(work) == cut(lengths, 9_216)


@pytest.mark.parametrize(
    ("lengths", "tiles", "programs", "size"),
    [
        ([420] * 64, 1, 264, 128),
        ([4096] * 64, 1, 264, 1024),
        ([420] * 64, 2, 132, 448),  # whole: with both tiles of each row the wave is full
        ([4096] * 64, 2, 132, 4096),
        ([8192] * 64, 1, 264, 2048),
        ([4096], 2, 132, 64),
        ([400] * 63 + [30_000], 2, 132, 896),  # one long row is cut among many short ones
    ],
)
def test_a_plan_of_one_wave_cuts_no_finer_than_its_programs_shares(
    device: torch.device, lengths: list[int], tiles: int, programs: int, size: int
) -> None:
    work = DecodeWork.make(64, tiles, 1, 16, device=device, extra_programs=programs, one_wave=True)
    plan_decode(inputs_of(lengths, 64, device), work, 16, 64)
    assert planned(work) == cut(lengths, size)
    assert work.item_limit(64) == 64 + programs // tiles


def cut(lengths: list[int], size: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, chunk) -> (place among the partial results, positions) of all items that must be."""
    found = {}
    for row, length in enumerate(lengths):
        for chunk in range(-(-length // size)):
            found[row, chunk] = (len(found), min(size, length - chunk * size))
    return found


def planned(work: DecodeWork) -> dict[tuple[int, int], tuple[int, int]]:
    """The same of the items that are."""
    found = {}
    for item in work.items[: int(work.num_items)].tolist():
        row, _, chunk, size, length, first = item[:6]
        found[row, chunk] = (first + chunk, min(size, length - chunk * size))
    return found


def inputs_of(lengths: list[int], max_rows: int, device: torch.device) -> StepInputs:
    inputs = StepInputs.make(1, max_rows, device)
    inputs.counts[NUM_DECODE_ROWS] = len(lengths)
    inputs.q_start_R[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32) - 1
    return inputs


def size_of(work: DecodeWork) -> int:
    """Positions of the chunks of a plan: all rows' are alike."""
    sizes = {item[SIZE.value] for item in work.items[: int(work.num_items)].tolist()}
    return sizes.pop() if len(sizes) == 1 else 64


def limit_of(work: DecodeWork, lengths: list[int], span: AttentionSpan = FULL) -> int:
    """Items of a step with these rows; more of them where chunks would be long."""
    few = len(lengths) + work.extra_items
    num_seen = sum(length - span.first_position(length - 1) for length in lengths)
    is_long = num_seen > few * LONG_CHUNK.value
    return work.item_limit(len(lengths)) if is_long else few


def is_as_fine_as_it_may_be(size: int, count: Callable[[int], int], limit: int) -> bool:
    """Whether the items are enough for chunks of this size, and for none of the next finer one."""
    finest = max(64, (1 << (size - 1).bit_length()) // 16)
    return not size % 64 and count(size) <= limit and (size == 64 or count(size - finest) > limit)


def cut_span(lengths: list[int], size: int, span: AttentionSpan) -> dict[tuple[int, int], int]:
    """(row, chunk) -> place, of the chunks that a span reaches."""
    found: dict[tuple[int, int], int] = {}
    for row, length in enumerate(lengths):
        for chunk in range(span.first_position(length - 1) // size, -(-length // size)):
            found[row, chunk] = len(found)
    return found


LENGTHS = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 200_000)), min_size=0, max_size=40)


@settings(max_examples=num_cases(25, exploring=50))
@given(lengths=LENGTHS, spare=st.integers(0, 9), kv_heads=st.sampled_from([1, 8, 32]))
def test_a_plan_cuts_every_row_as_finely_as_the_items_allow(
    device: torch.device, lengths: list[int], spare: int, kv_heads: int
) -> None:
    work = DecodeWork.make(50, kv_heads, 1, 16, device=device)
    bucket = len(lengths) + spare
    limit = limit_of(work, lengths)  # whatever the bucket
    plan_decode(inputs_of(lengths, 50, device), work, 16, bucket)
    size = size_of(work)
    assert is_as_fine_as_it_may_be(size, lambda size: len(cut(lengths, size)), limit)
    expected = cut(lengths, size)
    assert int(work.num_items) == len(expected) <= work.items.shape[0]
    assert planned(work) == expected
    items = work.items[: len(expected)].tolist()
    sizes = [expected[item[ROW.value], item[CHUNK.value]][1] for item in items]
    slack = -(-size // 8)  # a size class
    assert all(later <= earlier + slack for earlier, later in zip(sizes, sizes[1:], strict=False))


@settings(max_examples=num_cases(25, exploring=50))
@given(
    lengths=LENGTHS,
    spare=st.integers(0, 9),
    size=st.integers(1, 9000),
    kind=st.sampled_from([AttentionSpan.window, AttentionSpan.chunk]),
)
def test_a_plan_of_a_span_has_the_chunks_that_it_reaches(
    device: torch.device,
    lengths: list[int],
    spare: int,
    size: int,
    kind: Callable[[int], AttentionSpan],
) -> None:
    span = kind(size)
    work = DecodeWork.make(50, 8, 1, 16, device=device).for_span(span)
    plan_decode(inputs_of(lengths, 50, device), work, 16, len(lengths) + spare)
    size = size_of(work)
    assert is_as_fine_as_it_may_be(
        size,
        lambda size: len(cut_span(lengths, size, span)),
        limit_of(work, lengths, span),
    )
    items = work.items[: int(work.num_items)].tolist()
    found = {(row, chunk): first + chunk for row, _, chunk, _, _, first in (i[:6] for i in items)}
    assert len(found) == len(items)
    assert found == cut_span(lengths, size, span)
    assert len({item[SIZE.value] for item in items}) <= 1
