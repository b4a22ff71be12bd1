"""Rows of one slot that are one item of decode attention: drafts see the context that is read once.

Shape legend: R rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.kernels.attention.decode_plan import (
    CHUNK,
    LENGTH,
    MIN_CHUNK,
    NUM_ROWS,
    ROW,
    DecodeWork,
    plan_decode,
    rows_together,
)
from services.compute.kernels.kv.kv_format import FP8, INT8
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, StepInputs
from tests.cases import crossed, num_cases
from tests.kernels.decode_steps import Shape, make_step

LENGTHS, NUM_DRAFTS = [1, 60, 150, 64, 125], [3, 0, 7, 2, 5]


def shapes() -> Iterator[Shape]:
    for group in (1, 2, 3, 4, 5, 8):
        yield Shape(group=group)
    yield Shape(group=4, head_dim=64, page_tokens=16, dtype=torch.bfloat16)
    for entry in (FP8, INT8):
        yield Shape(group=4, head_dim=64, page_tokens=16, dtype=torch.bfloat16, entry=entry)
    yield Shape(group=3, softcap=0.5, has_sinks=True)


@pytest.mark.parametrize("shape", list(shapes()), ids=str)
def test_rows_with_drafts_agree_with_float64(device: torch.device, shape: Shape) -> None:
    step = make_step(device, LENGTHS, shape, num_drafts=NUM_DRAFTS)
    together = rows_together(shape.group, 7)
    work = step.work(rows_together=together)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    items = work.items[: int(work.num_items)].tolist()
    assert max(item[NUM_ROWS.value] for item in items) == together
    first = step.attend(work)
    step.check(first)
    assert torch.equal(first, step.attend(work))


@pytest.mark.parametrize(
    ("span", "case"),
    crossed(
        [*map(AttentionSpan.window, (1, 2, 5, 70, 1000)), *map(AttentionSpan.chunk, (5, 32, 100))],
        [(MIN_CHUNK, None), (16, None), (16, FP8)],
    ),
)
def test_each_row_sees_its_own_part_of_a_span(
    device: torch.device, span: AttentionSpan, case: tuple[int, torch.dtype | None]
) -> None:
    min_chunk, entry = case
    shape = Shape(entry=entry, has_sinks=True)
    step = make_step(device, LENGTHS, shape, span.size, span, NUM_DRAFTS)
    work = step.work(min_chunk, rows_together(shape.group, 7))
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    step.check(step.attend(work, span), span)
    of_span = work.for_span(span)
    plan_decode(step.inputs, of_span, shape.page_tokens, step.bucket)
    step.check(step.attend(of_span, span), span)
    step.check(step.attend(of_span, span), span)


def test_a_row_has_what_it_has_alone_whatever_its_drafts_see_beyond_it(
    device: torch.device,
) -> None:
    shape = Shape(group=4)
    step = make_step(device, [40, 97, 300], shape, num_drafts=[2, 3, 1])
    alone, together = step.work(), step.work(rows_together=rows_together(4, 3))
    for work in (alone, together):
        plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    torch.testing.assert_close(step.attend(alone), step.attend(together), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize(
    ("group", "max_drafts", "rows"), [(1, 7, 8), (1, 15, 16), (4, 7, 4), (7, 7, 2), (8, 0, 1)]
)
def test_rows_are_together_as_far_as_a_tile_reaches(group: int, max_drafts: int, rows: int) -> None:
    assert rows_together(group, max_drafts) == rows


def test_more_heads_than_a_tile_has_are_of_one_row() -> None:
    assert rows_together(20, 7) == 1


Rows = list[tuple[int, int]]  # a length and a number of drafts for each slot


@settings(max_examples=num_cases(25, exploring=50))
@given(
    rows=st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 9)), max_size=12),
    together=st.integers(1, 16),
    span=st.one_of(st.just(FULL), st.integers(1, 9000).map(AttentionSpan.window)),
)
def test_items_have_all_rows_once_and_what_the_first_of_them_begins_to_see(
    device: torch.device, rows: Rows, together: int, span: AttentionSpan
) -> None:
    inputs, firsts = inputs_of(rows, together, device)
    work = DecodeWork.make(128, 8, 1, 16, device=device, rows_together=together).for_span(span)
    num_rows = int(inputs.counts[NUM_DECODE_ROWS])
    plan_decode(inputs, work, 16, num_rows + 3)
    items = work.items[: int(work.num_items)].tolist()
    assert len(items) <= work.item_limit(num_rows)
    chunks_of: dict[int, list[int]] = {}
    for row, slot, chunk, size, length, _, count, _ in items:
        assert (length, count) == firsts[row]
        assert slot == int(inputs.row_slot_R[row])
        begin = span.first_position(length - count)
        assert begin // size <= chunk <= (length - 1) // size
        chunks_of.setdefault(row, []).append(chunk)
    assert chunks_of.keys() == firsts.keys()
    size = items[0][3] if items else 1
    for row, chunks in chunks_of.items():
        length, count = firsts[row]
        begin = span.first_position(length - count)
        assert sorted(chunks) == list(range(begin // size, (length - 1) // size + 1))
    assert all(item[ROW.value] >= 0 <= item[CHUNK.value] < item[LENGTH.value] for item in items)


def inputs_of(
    rows: Rows, together: int, device: torch.device
) -> tuple[StepInputs, dict[int, tuple[int, int]]]:
    """And by the first row of each item the length of its last one, and how many it has."""
    inputs, row, firsts = StepInputs.make(1, 128, device), 0, {}
    for slot, (length, num_drafts) in enumerate(rows):
        for number in range(1 + num_drafts):
            inputs.q_start_R[row] = length + number - 1
            inputs.row_slot_R[row] = slot
            inputs.row_number_R[row] = number
            if not number % together:
                count = min(together, 1 + num_drafts - number)
                firsts[row] = (length + number + count - 1, count)
            row += 1
    inputs.counts[NUM_DECODE_ROWS] = row
    return inputs, firsts
