"""Attention to keys and values made of latents on Hopper: what latent_prefill promises, and when it
is taken."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.mla.hopper_expanded import expanded_chunk_attention, serves
from services.compute.kernels.mla.latent_prefill import (
    expanded_attention,
    expanded_attention_reference,
)
from tests.kernels.expanded_steps import attend, error, made
from tests.kernels.latent_steps import BOUNDS, Shape, Step

RAGGED = [
    (0, 1),
    (0, 63),
    (40, 100),
    (0, 65),
    (128, 128),
    (0, 129),
    (1000, 300),
    (127, 1),
    (0, 257),
]
MANY = [(31 * row, 150 + 17 * row) for row in range(12)]  # 29 items: with 16 heads, four rounds
HALF = torch.bfloat16
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")


def shape_of(heads: int, dtype: torch.dtype = HALF) -> Shape:
    """DeepSeek's widths of heads, 128, 64 and 128."""
    return Shape(heads, latent_dim=128, rope_dim=64, dtype=dtype)


def check(step: Step, num_contexts: int, device: torch.device) -> None:
    keys, up_HXL = made(step, num_contexts)
    queries, found = attend(step, keys, up_HXL, expanded_chunk_attention)
    wanted = torch.full_like(found, torch.nan, dtype=torch.float64)
    expanded_attention_reference(queries._replace(out_THV=wanted), keys, step.inputs)
    assert error(found, wanted) < BOUNDS[step.shape.dtype]


def test_what_it_is_not_written_for_is_left_to_the_other_kernel(device: torch.device) -> None:
    step = Step(Shape(heads=1), [(0, 9)], 0, device)
    keys, up_HXL = made(step, 0)
    _, expected = attend(step, keys, up_HXL, expanded_attention)
    _, found = attend(step, keys, up_HXL, expanded_chunk_attention)
    assert torch.equal(found[:9], expected[:9])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [1, 3, 16, 48, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_heads_matches_float64(
    heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(Step(shape_of(heads, dtype), RAGGED, 0, device), 2000, device)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("heads", [16, 128])
def test_a_program_s_later_tiles_are_of_their_own_rows(heads: int, device: torch.device) -> None:
    check(Step(shape_of(heads), MANY, 0, device), 4000, device)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_contexts", [0, 700])
def test_rows_without_room_are_left_out(num_contexts: int, device: torch.device) -> None:
    check(Step(shape_of(16), RAGGED, 0, device), num_contexts, device)


@pytest.mark.gpu
@on_hopper
def test_without_items_nothing_is_written(device: torch.device) -> None:
    step = Step(shape_of(16), [(100, 128)], 0, device)
    _, found = attend(step, *made(step, 0), expanded_chunk_attention)
    assert found.isnan().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("cut", [1, 64, 128, 333, 1000, 1499])
def test_results_do_not_depend_on_where_a_text_is_cut(cut: int, device: torch.device) -> None:
    """Nor on the rows beside it."""
    whole = Step(shape_of(16), [(0, 1500)], 0, device)
    parts = Step(shape_of(16), [(0, 77), (cut, 1500 - cut)], 0, device)
    _, expected = attend(whole, *made(whole, 0), expanded_chunk_attention)
    pages = whole.table[int(whole.inputs.row_slot_R[0]), : parts.table.shape[1]]
    parts.table += len(whole.layer.entries)
    parts.table[int(parts.inputs.row_slot_R[1])] = pages
    entries = torch.cat([whole.layer.entries, parts.layer.entries])
    parts.layer = parts.layer._replace(entries=entries)
    parts.q_THW[77 : 77 + 1500 - cut] = whole.q_THW[cut:1500]
    _, found = attend(parts, *made(parts, 1500), expanded_chunk_attention)
    assert torch.equal(found[77 : 77 + 1500 - cut], expected[cut:1500])


@pytest.mark.gpu
@on_hopper
def test_it_is_taken_for_half_precision_and_these_widths_alone(device: torch.device) -> None:
    def is_taken(shape: Shape) -> bool:
        step = Step(shape, [(0, 9)], 0, device)
        keys, up_HXL = made(step, 0)
        queries, _ = attend(step, keys, up_HXL, expanded_attention)
        return serves(queries, keys)

    assert is_taken(shape_of(16)) and is_taken(shape_of(3, torch.float16))
    assert not is_taken(shape_of(3, torch.float32))
    assert not is_taken(Shape(3, 128, 32, dtype=HALF))
    assert not is_taken(Shape(3, 32, 64, dtype=HALF))
