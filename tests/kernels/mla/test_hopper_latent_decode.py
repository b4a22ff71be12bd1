"""Decode over latents for Hopper: what latent_decode_attention promises, and when it is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.mla.hopper_latent_decode import (
    hopper_latent_attention,
    latent_row_attention,
    serves,
)
from services.compute.kernels.mla.latent_heads import absorb_queries, expand_values
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS
from tests.kernels.latent_steps import MAX_ROWS, Shape, Step
from tests.kernels.quantized_pages import ENTRIES

STARTS = (0, 1, 62, 63, 64, 126, 127, 128, 199, 999, 1022, 2047, 3000, 14, 15)
RAGGED = [*[(start, 1) for start in STARTS], (20, 3)]  # decode rows, and a chunk that is none
HALF = torch.bfloat16
PLANS = [(64, 1), (64, 16), (16, 200)]  # shortest chunks and their number: whole, cut, cut finely
NUM_LAYERS, REPEATS = 4, 20
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")


def shape_of(heads: int, dtype: torch.dtype = HALF, page_tokens: int = 16) -> Shape:
    return Shape(heads, 512, 64, dtype, page_tokens=page_tokens)


def test_what_it_is_not_written_for_is_left_to_the_other_kernel(device: torch.device) -> None:
    step = Step(Shape(48), [(9, 1)], 1, device)
    by_choice = step.decode(16, 16, attention=latent_row_attention)
    assert torch.equal(by_choice[:1], step.decode(16, 16)[:1])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [1, 16, 33, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize(("min_chunk", "extra_items"), PLANS)
def test_ragged_rows_whole_and_cut_match_float64(
    heads: int, dtype: torch.dtype, min_chunk: int, extra_items: int, device: torch.device
) -> None:
    step = Step(shape_of(heads, dtype), RAGGED, len(STARTS), device)
    found = step.decode(min_chunk, extra_items, attention=hopper_latent_attention)
    step.check(found, range(len(STARTS)))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("min_chunk", "extra_items"), PLANS)
def test_every_page_size_matches_float64(
    page_tokens: int, min_chunk: int, extra_items: int, device: torch.device
) -> None:
    step = Step(shape_of(128, page_tokens=page_tokens), RAGGED, len(STARTS), device)
    found = step.decode(min_chunk, extra_items, attention=hopper_latent_attention)
    step.check(found, range(len(STARTS)))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [48, 128])
def test_bits_depend_neither_on_the_run_nor_on_other_rows(heads: int, device: torch.device) -> None:
    step = Step(shape_of(heads), RAGGED, len(STARTS), device)
    whole = step.decode(64, 1, attention=hopper_latent_attention)[: len(STARTS)]
    for _ in range(3):
        again = step.decode(64, 1, attention=hopper_latent_attention)
        assert torch.equal(again[: len(STARTS)], whole)
    for num_rows in (1, 7, 12):
        step.inputs.counts[NUM_DECODE_ROWS] = num_rows
        fewer = step.decode(4096, 1, attention=hopper_latent_attention)
        assert torch.equal(fewer[:num_rows], whole[:num_rows])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [48, 128])
@pytest.mark.parametrize(("min_chunk", "extra_items"), PLANS)
def test_launches_that_overlap_do_what_they_do_one_after_the_other(
    heads: int, min_chunk: int, extra_items: int, device: torch.device
) -> None:
    step = Step(shape_of(heads), RAGGED, len(STARTS), device)
    work = step.plan(min_chunk, extra_items)
    run = layers_of(step, work)
    expected = run(torch.cuda.synchronize).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(REPEATS):
        work.items.fill_(1 << 20)  # of an earlier step
        graph.replay()
        assert torch.equal(found[: len(STARTS)], expected[: len(STARTS)])


def layers_of(step: Step, work: DecodeWork) -> Callable[[Callable[[], None]], Tensor]:
    """A step's plan and layers of attention, each of what the one before it wrote; what they are
    called with comes after each launch."""
    heads, device, call = step.shape.heads, step.q_THW.device, step.call()
    rank, rotated, num_tokens = step.shape.latent_dim, step.shape.rope_dim, step.bucket
    random = torch.Generator().manual_seed(1)

    def values(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random).to(device, step.shape.dtype)

    key_up, value_up = values(heads, rotated, rank), values(heads, 2 * rotated, rank)
    first_THD = values(num_tokens, heads, 2 * rotated)
    angles_PD = torch.rand(1, rotated // 2, generator=random) * 6
    tables = RotaryTables(angles_PD.cos().to(device), angles_PD.sin().to(device))
    positions_T = step.inputs.positions_T[:num_tokens]

    def run(between: Callable[[], None]) -> Tensor:
        num_rows = min(num_tokens, MAX_ROWS)
        q_THD = first_THD
        call.out_THD.zero_()
        plan_decode(step.inputs, work, step.shape.page_tokens, num_rows)
        for _ in range(NUM_LAYERS):
            between()
            absorb_queries(q_THD, key_up, positions_T, tables, call.q_THD, pdl=True)
            between()
            latent_row_attention(call, work, num_rows, pdl=True)
            between()
            q_THD = torch.empty_like(first_THD)
            expand_values(call.out_THD, value_up, q_THD, pdl=True)
        between()
        return q_THD

    return run


@pytest.mark.gpu
@on_hopper
def test_it_is_taken_for_many_heads_of_half_precision_alone(device: torch.device) -> None:
    def is_taken(shape: Shape) -> bool:
        return serves(Step(shape, [(9, 1)], 1, device).call())

    assert all(is_taken(shape_of(heads)) for heads in (33, 48, 64, 80, 128))
    assert all(is_taken(shape_of(128, page_tokens=size)) for size in (8, 64, 128))
    assert is_taken(shape_of(64, torch.float16))
    assert not any(is_taken(shape_of(heads)) for heads in (1, 16, 32, 65))  # 65: tiles of 13
    assert not is_taken(shape_of(128, torch.float32))
    assert not is_taken(shape_of(128, page_tokens=256))
    assert not is_taken(Shape(128, 256, 64, HALF)) and not is_taken(Shape(128, 512, 32, HALF))
    assert not any(is_taken(Shape(128, 512, 64, HALF, entry)) for entry in ENTRIES)
