from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import SamplingParams
from services.compute.kernels.step.slot_words import NO_MASK, NUM_WORDS, VOID_MASK
from services.compute.kernels.step.step_buffers import GROUP_SHIFT, HEADER_INTS
from services.compute.runner.uploads import (
    NO_SLOT_ROWS,
    VARIANT,
    StepPacker,
    StepUpload,
    masks_size,
    pack_masks,
    packed_size,
    read_masks,
    split,
    without_rows,
)
from services.compute.sampling.slots import Variant, slots_of
from services.compute.step import (
    DEVICE_TOKEN,
    NO_IDS,
    Int32Array,
    PoolRow,
    ScoreRow,
    SlotDelta,
    StepPlan,
    TokenMasks,
    int32_array,
)
from tests.unit.compute.step_plans import PlanSizes, random_plan, random_slot_rows

POISON = -77
GREEDY = SamplingParams(max_tokens=9, seed=1, temperature=0.0)


@st.composite
def plan_sizes(draw: st.DrawFn) -> PlanSizes:
    return PlanSizes(
        draw(st.integers(0, 16)),
        tuple(draw(st.lists(st.integers(1, 60), max_size=8))),
        draw(st.integers(0, 100)),
        num_groups=draw(st.integers(1, 3)),
    )


def packed(
    plan: StepPlan, slot_rows: Int32Array = NO_SLOT_ROWS, packer: StepPacker | None = None
) -> Int32Array:
    out = np.full(10_000, POISON, dtype=np.int32)
    num_ints = (packer or StepPacker(1000)).pack(plan, slot_rows, out)
    assert (out[num_ints:] == POISON).all()
    return out[:num_ints]


@given(plan_sizes(), st.integers(0, 20), st.integers(0, 1000), st.booleans())
def test_every_section_is_read_back_from_the_header_alone(
    sizes: PlanSizes, num_slot_rows: int, seed: int, kept: bool
) -> None:
    plan = random_plan(sizes, seed)
    slot_rows = random_slot_rows(num_slot_rows, NUM_WORDS, sizes.num_slots, seed)
    packer = StepPacker(1000)
    decodes = slice(plan.num_decode_rows)
    if kept:
        packed(replace(without_chunks(plan), step_id=1), packer=packer)
    step = StepUpload.read(packed(plan, slot_rows, packer))
    assert step.header[:4] == [
        *(plan.num_rows, plan.num_decode_rows, plan.num_tokens, len(plan.sample_row)),
    ]
    assert step.step_id == plan.step_id
    assert step.at.end == len(step.ints)
    page_slot = plan.page_slot
    if sizes.num_groups > 1:
        page_slot = page_slot + (plan.page_group << GROUP_SHIFT)
    first_token = np.cumsum(plan.q_len) - plan.q_len
    given_rows = np.flatnonzero(plan.tokens[decodes] != DEVICE_TOKEN)
    num_kept = plan.num_decode_rows if kept and plan.num_rows else 0
    chunks = slice(plan.num_decode_rows, None)
    for name, expected in (
        ("row_slot", plan.row_slot[num_kept:]),
        ("chunk_start", plan.q_start[chunks]),
        ("token_start", first_token[chunks]),
        ("tokens", plan.tokens[chunks]),
        ("sample_row", plan.sample_row[chunks]),
        ("sample_index", plan.sample_index[chunks]),
        ("page_slot", page_slot),
        ("page_index", plan.page_index),
        ("page_id", plan.page_id),
    ):
        assert step.section(name).tolist() == expected.tolist(), name
    assert step.slot_rows().tolist() == slot_rows.tolist()
    columns = plan.row_slot, plan.q_start, plan.sample_index, plan.tokens
    assert step.states().tolist() == [column[given_rows].tolist() for column in columns]


def without_chunks(plan: StepPlan) -> StepPlan:
    decodes = slice(plan.num_decode_rows)
    return replace(
        without_rows(plan),
        num_decode_rows=plan.num_decode_rows,
        row_slot=plan.row_slot[decodes],
        q_start=plan.q_start[decodes],
        q_len=plan.q_len[decodes],
        tokens=plan.tokens[decodes],
        sample_row=plan.sample_row[decodes],
        sample_index=plan.sample_index[decodes],
        page_slot=NO_IDS,
        page_index=NO_IDS,
        page_id=NO_IDS,
        page_group=NO_IDS,
    )


@given(plan_sizes(), st.integers(0, 20))
def test_no_plan_within_the_limits_is_larger_than_the_bound(
    sizes: PlanSizes, num_slot_rows: int
) -> None:
    plan = random_plan(sizes, 0)
    slot_rows = random_slot_rows(num_slot_rows, NUM_WORDS, sizes.num_slots, 0)
    assert len(packed(plan, slot_rows)) <= packed_size(24, 16 + 8 * 60, 100, 20)


def test_scores_and_pools_come_with_the_step() -> None:
    plan = random_plan(PlanSizes(3, (5, 4, 7), 6), 1)
    scores = (ScoreRow(3, 2, int32_array((7, 8, 9))), ScoreRow(5, 0, int32_array((1,))))
    pools = PoolRow(4, True), PoolRow(5, False)
    slot_rows = random_slot_rows(2, NUM_WORDS, 32, 1)
    step = StepUpload.read(packed(replace(plan, scores=scores, pools=pools), slot_rows))
    read = [(score.row, score.num_top, score.targets.tolist()) for score in step.scores()]
    assert read == [(3, 2, [7, 8, 9]), (5, 0, [1])]
    assert step.pools() == pools
    for row, first in ((3, 3), (4, 8), (5, 12)):
        slot, start, length = (int(c[row]) for c in (plan.row_slot, plan.q_start, plan.q_len))
        assert step.chunk(row) == (row, slot, start, first, length)


def test_rows_are_sent_anew_after_a_step_that_did_not_reach_the_device() -> None:
    plan, packer = random_plan(PlanSizes(3), 1), StepPacker(32)
    whole = packed(plan, packer=packer).tolist()
    assert len(packed(plan, packer=packer)) == len(whole) - 3
    packer.forget_rows()
    assert packed(plan, packer=packer).tolist() == whole


def steady_plan(**changes: Any) -> StepPlan:
    plan = without_chunks(random_plan(PlanSizes(4), 1))
    return replace(plan, tokens=np.full(4, DEVICE_TOKEN, dtype=np.int32), **changes)


def test_a_steady_step_is_a_header_until_a_slot_has_another_owner() -> None:
    plan, packer = steady_plan(), StepPacker(32)
    assert len(packed(plan, packer=packer)) == HEADER_INTS + 4
    again = replace(plan, step_id=2**40 + 1, q_start=plan.q_start + 1)
    for _ in range(2):
        step = StepUpload.read(packed(again, packer=packer))
        assert (len(step.ints), step.step_id) == (HEADER_INTS, 2**40 + 1)
        assert step.header[:8] == [4, 4, 4, 4, 0, 0, 4, 0]
        assert step.header[VARIANT] == Variant.PLAIN
    penalised = replace(GREEDY, presence_penalty=1.0)
    slot_rows, _ = slots_of([SlotDelta(int(plan.row_slot[2]), 1, penalised, 0, ())], 500)
    assert StepUpload.read(packed(again, slot_rows, packer)).header[VARIANT] == Variant.ADJUSTED
    assert StepUpload.read(packed(again, packer=packer)).header[VARIANT] == Variant.ADJUSTED


def test_early_stops_are_looked_at_in_every_step() -> None:
    plan, packer = steady_plan(), StepPacker(32)
    early = replace(GREEDY, min_tokens=5, max_tokens=9)
    slot_rows, _ = slots_of([SlotDelta(int(s), 1, early, 0, (3,)) for s in plan.row_slot], 500)
    variants = []
    for index in range(4, 7):
        plan = replace(plan, sample_index=np.full(4, index, dtype=np.int32))
        header = StepUpload.read(packed(plan, slot_rows, packer)).header
        variants.append(header[VARIANT])
        slot_rows = NO_SLOT_ROWS
    assert variants == [Variant.ADJUSTED, Variant.PLAIN, Variant.PLAIN]


def test_rows_are_kept_over_a_step_without_rows() -> None:
    plan, packer = random_plan(PlanSizes(3, (), 4), 1), StepPacker(32)
    packed(plan, packer=packer)
    packed(without_rows(plan), packer=packer)
    assert not len(StepUpload.read(packed(plan, packer=packer)).section("row_slot"))


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    plan = random_plan(PlanSizes(4, (5,)), 1)
    out = np.full(len(packed(plan)) - 1, POISON, dtype=np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        StepPacker(32).pack(plan, NO_SLOT_ROWS, out)
    assert (out == POISON).all()


def test_masks_are_read_back_in_the_order_of_their_samples() -> None:
    bits = int32_array(range(6)).reshape(3, 2)
    forced = {"forced_samples": int32_array((5,)), "forced_tokens": int32_array((60,))}
    masks = TokenMasks(int32_array((4, 0, 2)), bits, skipped=(1,), **forced)
    out = np.full(masks_size(6, 2), POISON, dtype=np.int32)
    num_ints = pack_masks(masks, 6, 2, out)
    assert out[:6].tolist() == [1, VOID_MASK, 2, NO_MASK, 0, -63]
    read = read_masks(out[:num_ints], 6, 2)
    assert (read.samples.tolist(), read.skipped) == ([0, 2, 4], (1,))
    assert read.bits.tolist() == bits[[1, 2, 0]].tolist()
    assert (read.forced_samples.tolist(), read.forced_tokens.tolist()) == ([5], [60])


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
    assert packed(changes)[:HEADER_INTS].tolist()[:8] == [0, 0, 0, 0, 10, 0, 0, 0]
