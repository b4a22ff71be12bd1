from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from services.compute.kernels.step.slot_words import NUM_WORDS
from services.compute.kernels.step.step_buffers import HEADER_INTS, NO_SLOT, Resident, StepInputs
from services.compute.kernels.step.step_deltas import apply_deltas, apply_deltas_reference
from services.compute.kernels.step.step_input import unpack_step, unpack_step_reference
from services.compute.runner.uploads import StepPacker
from services.compute.step import DEVICE_TOKEN, NO_IDS, Int32Array, StepPlan
from tests.unit.compute.step_plans import PlanSizes, random_plan, random_slot_rows

MAX_ROWS = 320
MAX_TOKENS = 700
POISON = -77

CASES = {
    "nothing": PlanSizes(),
    "one decode row": PlanSizes(1, (), 1),
    "decode rows": PlanSizes(31, (), 3),
    "one chunk": PlanSizes(0, (7,), 2),
    "a chunk of a token": PlanSizes(3, (1, 5)),
    "chunks only": PlanSizes(0, (9, 1, 30, 64), 12),
    "mixed": PlanSizes(21, (33, 2, 5, 70, 1), 17),
    "mixed in more than one block": PlanSizes(150, (129, 3, 200), 300, 160, max_pages=32),
    "a block of decode rows, then chunks": PlanSizes(128, (4, 5, 6, 7, 8), 5, 140),
    "more decode rows than two blocks": PlanSizes(300, (), 40, 320),
    "many short chunks": PlanSizes(5, (2,) * 130, 2500, 160),
    "three cache groups": PlanSizes(21, (33, 2, 90), 17, num_groups=3),
    "pages of one token's width": PlanSizes(8, (11,), 9, page_tokens=1, max_pages=128),
}


class Step(NamedTuple):
    """A packed step in front of random tables."""

    sizes: PlanSizes
    plan: StepPlan
    slot_rows: Int32Array
    packed: Tensor
    tables: Resident
    kept_P: Tensor  # slots of the rows that are those of the step before


def make_step(sizes: PlanSizes, seed: int, num_slot_rows: int = 0, kept: bool = False) -> Step:
    """With `kept` the decode rows are those of the step before."""
    plan = random_plan(sizes, seed)
    slot_rows = random_slot_rows(num_slot_rows, NUM_WORDS, sizes.num_slots, seed)
    out = np.full(20_000, POISON, dtype=np.int32)
    packer = StepPacker(sizes.num_slots)
    num_kept = plan.num_decode_rows if kept else 0
    if kept:
        before = replace(sizes, chunks=())
        packer.pack(
            replace(random_plan(before, seed + 1), row_slot=plan.row_slot[:num_kept]),
            slot_rows[:0],
            out,
        )
    packer.pack(plan, slot_rows, out)
    generator = torch.Generator().manual_seed(seed)

    def table(*shape: int, high: int = 10_000) -> Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, generator=generator)

    tables = Resident(
        page_table=table(sizes.num_groups, sizes.num_slots, sizes.max_pages),
        length=table(sizes.num_slots, high=sizes.max_pages * sizes.page_tokens),
        output_index=table(sizes.num_slots),
        last_token=table(sizes.num_slots),
        slot_params=table(sizes.num_slots, NUM_WORDS),
        drafts_NK=table(sizes.num_slots, 1),
    )
    decodes = slice(plan.num_decode_rows)
    slots = plan.row_slot[decodes]
    tables.length.numpy()[slots] = plan.q_start[decodes]
    tables.output_index.numpy()[slots] = plan.sample_index[decodes]
    given = plan.tokens[decodes] != DEVICE_TOKEN
    tables.length.numpy()[slots[given]] = -1  # the upload says it
    kept_P = torch.from_numpy(plan.row_slot[:num_kept].copy())
    return Step(sizes, plan, slot_rows, torch.from_numpy(out), tables, kept_P)


def moved(record: Resident | StepInputs, device: torch.device) -> Resident | StepInputs:
    return type(record)(*(tensor.clone().to(device) for tensor in record))


def poisoned_inputs(device: torch.device, num_groups: int) -> StepInputs:
    inputs = StepInputs.make(MAX_TOKENS, MAX_ROWS, device, num_groups)
    for tensor in inputs:
        tensor.fill_(POISON)
    return inputs


def assert_equal(actual: Resident | StepInputs, expected: Resident | StepInputs) -> None:
    for name in expected._fields:
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name).cpu()), name


def unpacked(
    step: Step,
    device: torch.device,
    unpack: Callable[..., None],
    bucket: int = 0,
) -> tuple[StepInputs, Resident]:
    """The step's inputs, and what stays on the device."""
    inputs = poisoned_inputs(device, step.sizes.num_groups)
    inputs.row_slot_R[: len(step.kept_P)] = step.kept_P.to(device)
    resident = moved(step.tables, torch.device("cpu"))
    apply_deltas_reference(step.packed, resident)
    resident = moved(resident, device)
    num_tokens = bucket or max(1, step.plan.num_tokens)
    unpack(step.packed.to(device), resident, inputs, num_tokens, step.sizes.page_tokens)
    return inputs, resident


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_slot_rows", [0, 1, 23])
def test_deltas_reach_their_places_and_nothing_else(
    name: str, num_slot_rows: int, device: torch.device
) -> None:
    step = make_step(CASES[name], len(name), num_slot_rows)
    plan, tables = step.plan, moved(step.tables, device)
    apply_deltas(step.packed.to(device), tables)
    expected = moved(step.tables, torch.device("cpu"))
    group = plan.page_group if len(plan.page_group) else 0
    expected.page_table.numpy()[group, plan.page_slot, plan.page_index] = plan.page_id
    expected.slot_params.numpy()[step.slot_rows[:, 0]] = step.slot_rows[:, 1:]
    decodes = slice(plan.num_decode_rows)
    given = plan.tokens[decodes] != DEVICE_TOKEN
    slots = plan.row_slot[decodes][given]
    expected.length.numpy()[slots] = plan.q_start[decodes][given]
    expected.output_index.numpy()[slots] = plan.sample_index[decodes][given]
    expected.last_token.numpy()[slots] = plan.tokens[decodes][given]
    assert_equal(tables, expected)


def test_deltas_are_the_reference_s(device: torch.device) -> None:
    step = make_step(PlanSizes(40, (6,), 50, 64), 3, 20)
    tables, expected = moved(step.tables, device), moved(step.tables, torch.device("cpu"))
    apply_deltas(step.packed.to(device), tables)
    apply_deltas_reference(step.packed, expected)
    assert_equal(tables, expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_unpacked_as_by_the_reference(name: str, seed: int, device: torch.device) -> None:
    step = make_step(CASES[name], seed, num_slot_rows=seed, kept=bool(seed % 2))
    expected = unpacked(step, torch.device("cpu"), unpack_step_reference)
    for ours, theirs in zip(unpacked(step, device, unpack_step), expected, strict=True):
        assert_equal(ours, theirs)


def test_a_steady_step_of_decode_rows_is_a_header() -> None:
    step = make_step(CASES["more decode rows than two blocks"], 3, kept=True)
    plan = replace(step.plan, page_slot=NO_IDS, page_index=NO_IDS, page_id=NO_IDS)
    plan = replace(plan, tokens=np.full_like(plan.tokens, DEVICE_TOKEN))
    packer, out = StepPacker(320), np.zeros(5000, dtype=np.int32)
    no_slot_rows = step.slot_rows[:0]
    assert packer.pack(plan, no_slot_rows, out) == HEADER_INTS + plan.num_rows
    assert packer.pack(plan, no_slot_rows, out) == HEADER_INTS


@pytest.mark.parametrize("bucket", [MAX_TOKENS, 400, 129])
@pytest.mark.parametrize(
    "name", ["nothing", "one decode row", "one chunk", "mixed", "three cache groups"]
)
def test_padding_fills_the_bucket_and_no_more(name: str, bucket: int, device: torch.device) -> None:
    bucket = max(bucket, CASES[name].num_decode_rows + sum(CASES[name].chunks))
    step = make_step(CASES[name], 7)
    inputs, _ = unpacked(step, device, unpack_step, bucket)
    expected, _ = unpacked(step, torch.device("cpu"), unpack_step_reference, bucket)
    assert_equal(inputs, expected)
    num_tokens, num_rows = step.plan.num_tokens, step.plan.num_rows
    num_samples = len(step.plan.sample_row)
    padded_rows = min(bucket, MAX_ROWS)
    for values, size, end, padding in (
        (inputs.tokens_T, num_tokens, bucket, 0),
        (inputs.positions_T, num_tokens, bucket, 0),
        *((kv_slots_T, num_tokens, bucket, -1) for kv_slots_T in inputs.kv_slots_GT),
        (inputs.row_slot_R, num_rows, padded_rows, 0),
        (inputs.q_len_R, num_rows, padded_rows, 0),
        (inputs.token_start_R, num_rows, padded_rows, num_tokens),
        (inputs.sample_token_S, num_samples, MAX_ROWS, 0),
        (inputs.sample_slot_S, num_samples, MAX_ROWS, NO_SLOT),
        (inputs.sample_index_S, num_samples, MAX_ROWS, 0),
    ):
        assert (values[size:end] == padding).all()
        assert (values[end:] == POISON).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kept", [False, True])
def test_the_reference_says_what_the_plan_says(name: str, kept: bool) -> None:
    step = make_step(CASES[name], 11, kept=kept)
    plan, sizes = step.plan, step.sizes
    inputs, resident = unpacked(step, torch.device("cpu"), unpack_step_reference)
    counts = [plan.num_rows, plan.num_decode_rows, plan.num_tokens, len(plan.sample_row)]
    assert inputs.counts.tolist() == [*counts, 0, 0, 0, 0]
    token, last_tokens = 0, []
    for row, slot in enumerate(plan.row_slot.tolist()):
        for position in range(plan.q_start[row], plan.q_start[row] + plan.q_len[row]):
            page_index, offset = divmod(position, sizes.page_tokens)
            known = int(plan.tokens[token])
            expected = int(step.tables.last_token[slot]) if known == DEVICE_TOKEN else known
            assert int(inputs.tokens_T[token]) == expected
            assert int(inputs.positions_T[token]) == position
            for group, kv_slots_T in enumerate(inputs.kv_slots_GT):
                page = int(resident.page_table[group, slot, page_index])
                assert int(kv_slots_T[token]) == page * sizes.page_tokens + offset
            token += 1
        last_tokens.append(token - 1)
    assert inputs.q_len_R[: plan.num_rows].tolist() == plan.q_len.tolist()
    assert inputs.q_start_R[: plan.num_rows].tolist() == plan.q_start.tolist()
    for sample, row in enumerate(plan.sample_row.tolist()):
        assert int(inputs.sample_token_S[sample]) == last_tokens[row]
        assert int(inputs.sample_slot_S[sample]) == int(plan.row_slot[row])
        assert int(inputs.sample_index_S[sample]) == int(plan.sample_index[sample])
        slot = int(plan.row_slot[row])
        assert int(resident.length[slot]) == int(plan.q_start[row] + plan.q_len[row]) - 1
        assert int(resident.output_index[slot]) == int(plan.sample_index[sample])
        assert int(resident.last_token[slot]) == int(inputs.tokens_T[last_tokens[row]])


def test_pages_beyond_two_billion_cache_slots_are_found(device: torch.device) -> None:
    step = make_step(PlanSizes(2, (3,), page_tokens=32), 5)
    step.tables.page_table.fill_(2**31 - 1)
    inputs, _ = unpacked(step, device, unpack_step)
    assert (inputs.kv_slots_GT[0, :5] // 32 == 2**31 - 1).all()
