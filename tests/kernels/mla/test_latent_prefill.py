"""Chunks over latents by way of keys and values that are made of these."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.kv.kv_format import FP8, INT8
from services.compute.kernels.mla.latent_expansion import (
    ENOUGH_QUERIES,
    StepKeys,
    expand_latents_reference,
    place_keys,
    place_keys_reference,
)
from services.compute.kernels.mla.latent_prefill import expanded_attention_reference
from tests.kernels.expanded_steps import attend, error, made
from tests.kernels.latent_steps import BOUNDS, PAGE_TOKENS, Shape, Step

SHAPES = [
    Shape(heads=3),
    Shape(heads=2, latent_dim=48, rope_dim=8),  # no powers of two
    Shape(heads=3, dtype=torch.bfloat16),
    Shape(heads=3, dtype=torch.bfloat16, entry=FP8),
    Shape(heads=2, entry=INT8),
]
ROWS = [(11, 1), (0, 70), (30, 17), (0, 1), *[(40, 5)] * 5, (64, 33), (90, 45)]
NUM_CONTEXTS = 100  # the last row's has no room


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_see_keys_and_values_made_of_latents(shape: Shape, device: torch.device) -> None:
    step = Step(shape, ROWS, 1, device)
    keys, up_HXL = made(step, NUM_CONTEXTS)
    queries, found = attend(step, keys, up_HXL)
    assert (keys.begin_R[: len(ROWS)] >= 0).tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0]

    bound = BOUNDS[shape.dtype]
    expected = keys._replace(
        expanded_KHX=torch.full_like(keys.expanded_KHX, torch.nan),
        turned_KP=torch.full_like(keys.turned_KP, torch.nan),
    )
    expand_latents_reference(step.layer, expected, up_HXL)
    assert error(keys.expanded_KHX, expected.expanded_KHX) < bound
    assert error(keys.turned_KP, expected.turned_KP) < bound
    wanted = torch.full_like(found, torch.nan, dtype=torch.float64)
    expanded_attention_reference(queries._replace(out_THV=wanted), keys, step.inputs)
    assert error(found, wanted) < bound


def test_results_do_not_depend_on_where_a_text_is_cut(device: torch.device) -> None:
    """Nor on whether its beginning was found in the cache."""
    whole, parts = (Step(Shape(heads=2), rows, 0, device) for rows in ([(0, 170)], [(130, 40)]))
    keys, up_HXL = made(whole, 200)
    _, expected = attend(whole, keys, up_HXL)
    parts.layer, parts.table[:] = whole.layer, whole.table[:, : parts.table.shape[1]]
    parts.q_THW[:40] = whole.q_THW[130:170]
    _, found = attend(parts, made(parts, 200)[0], up_HXL)
    # on the CPU by a library whose sums depend on where a row is, with some processors
    least = 0.0 if device.type == "cuda" else 1e-6
    torch.testing.assert_close(found[:40], expected[130:170], rtol=least, atol=least)


@pytest.mark.parametrize("seed", range(3))
def test_keys_are_placed_as_the_reference_places_them(seed: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seed)
    contexts = torch.randint(0, 400, (12,), generator=random)
    contexts *= torch.randint(0, 2, (12,), generator=random)
    lengths = torch.randint(1, 2 * ENOUGH_QUERIES, (12,), generator=random)
    rows = list(zip(contexts.tolist(), [1, 1, *lengths[2:].tolist()], strict=True))
    step = Step(Shape(heads=1, latent_dim=16, rope_dim=8), rows, 2, device)
    up_HXL = torch.zeros(1, 1, 16, device=device)
    found, expected = (StepKeys.make(step.inputs, 500, up_HXL, 8) for _ in range(2))
    place_keys(step.inputs, found, step.table, PAGE_TOKENS, step.bucket)
    place_keys_reference(step.inputs, expected, step.table, PAGE_TOKENS)
    for part, wanted in zip(found[2:6], expected[2:6], strict=True):
        assert torch.equal(part, wanted)
