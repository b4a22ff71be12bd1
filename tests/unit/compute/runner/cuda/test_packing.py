from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.kernels.step_buffers import GROUP_SHIFT, HEADER_INTS, Sections
from services.compute.runner.cuda.packing import (
    pack,
    packed_size,
    split,
    without_rows,
)
from services.compute.step import Int32Array, StepPlan
from tests.unit.compute.step_plans import PlanSizes, random_plan, random_slot_rows

NUM_WORDS = 5


@st.composite
def plan_sizes(draw: st.DrawFn) -> PlanSizes:
    return PlanSizes(
        draw(st.integers(0, 16)),
        tuple(draw(st.lists(st.integers(1, 60), max_size=8))),
        draw(st.integers(0, 100)),
        num_groups=draw(st.integers(1, 3)),
    )


def packed(plan: StepPlan, slot_rows: Int32Array, slack: int = 0) -> Int32Array:
    out = np.full(size_of(plan, slot_rows) + slack, -77, dtype=np.int32)
    assert pack(plan, slot_rows, out) == len(out) - slack
    return out


def size_of(plan: StepPlan, slot_rows: Int32Array) -> int:
    num_words = slot_rows.shape[1] - 1
    counts = [plan.num_rows, 0, plan.num_tokens, len(plan.sample_row), len(plan.page_slot)]
    return Sections.of([*counts, len(slot_rows)], num_words).end


def no_slot_rows() -> Int32Array:
    return np.zeros((0, 1 + NUM_WORDS), dtype=np.int32)


@given(plan_sizes(), st.integers(0, 20), st.integers(0, 1000))
def test_every_section_is_read_back_from_the_counts_alone(
    sizes: PlanSizes, num_slot_rows: int, seed: int
) -> None:
    plan = random_plan(sizes, seed)
    slot_rows = random_slot_rows(num_slot_rows, NUM_WORDS, sizes.num_slots, seed)
    out = packed(plan, slot_rows, slack=3)
    counts = out[:HEADER_INTS].tolist()
    at = Sections.of(counts, NUM_WORDS)
    assert counts[1] == plan.num_decode_rows
    assert counts[6:] == [0, 0]
    page_slot = plan.page_slot
    if sizes.num_groups > 1:
        page_slot = page_slot + (plan.page_group << GROUP_SHIFT)
    token_start = [0, *np.cumsum(plan.q_len).tolist()]
    for start, end, expected in (
        (at.row_slot, at.q_start, plan.row_slot.tolist()),
        (at.q_start, at.token_start, plan.q_start.tolist()),
        (at.token_start, at.tokens, token_start),
        (at.tokens, at.sample_row, plan.tokens.tolist()),
        (at.sample_row, at.sample_index, plan.sample_row.tolist()),
        (at.sample_index, at.page_slot, plan.sample_index.tolist()),
        (at.page_slot, at.page_index, page_slot.tolist()),
        (at.page_index, at.page_id, plan.page_index.tolist()),
        (at.page_id, at.slot_rows, plan.page_id.tolist()),
        (at.slot_rows, at.end, slot_rows.ravel().tolist()),
        (at.end, len(out), [-77] * 3),
    ):
        assert out[start:end].tolist() == expected


@given(plan_sizes(), st.integers(0, 20))
def test_no_plan_within_the_limits_is_larger_than_the_bound(
    sizes: PlanSizes, num_slot_rows: int
) -> None:
    plan = random_plan(sizes, 0)
    slot_rows = random_slot_rows(num_slot_rows, NUM_WORDS, sizes.num_slots, 0)
    bound = packed_size(24, 16 + 8 * 60, 100, 20, NUM_WORDS)
    assert len(packed(plan, slot_rows)) <= bound


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    plan = random_plan(PlanSizes(4, (5,)), 1)
    out = np.full(size_of(plan, no_slot_rows()) - 1, -77, dtype=np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        pack(plan, no_slot_rows(), out)
    assert (out == -77).all()


@given(plan_sizes(), st.integers(1, 40))
def test_split_parts_carry_every_entry_once_and_the_rows_last(sizes: PlanSizes, limit: int) -> None:
    plan = random_plan(sizes, 2)
    *early, step = split(plan, limit)
    parts = [*early, step]
    assert all(len(part.page_slot) <= limit for part in parts)
    assert all(part.num_rows == part.num_tokens == len(part.sample_row) == 0 for part in early)
    for name in ("page_slot", "page_index", "page_id", "page_group"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.tolist() == getattr(plan, name).tolist()
    assert step.row_slot is plan.row_slot
    assert step.tokens is plan.tokens


def test_a_plan_whose_entries_fit_is_left_alone() -> None:
    plan = random_plan(PlanSizes(4, (5,), 10), 1)
    assert split(plan, 10) == (plan,)


def test_a_step_that_cannot_run_still_changes_the_tables() -> None:
    plan = random_plan(PlanSizes(4, (5,), 10), 1)
    changes = without_rows(plan)
    assert changes.num_rows == changes.num_tokens == changes.num_decode_rows == 0
    assert changes.page_id is plan.page_id
    assert changes.slots is plan.slots
    assert packed(changes, no_slot_rows())[:HEADER_INTS].tolist() == [0, 0, 0, 0, 10, 0, 0, 0]
