"""The format against float64, at its edges, and what of it no rounding may change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import (
    FP8,
    INT8,
    LARGEST,
    LayerFormat,
    dequantize,
    quantize,
)

ENTRIES = (FP8, INT8)


def heads(count: int = 200, width: int = 64, seed: int = 0) -> Tensor:
    """Heads of very different sizes, some with a value far above the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    x *= 10.0 ** torch.randint(-20, 20, (count, 1), generator=generator)
    x[::3, 5] *= 100
    return x


def grid(entry: torch.dtype) -> Tensor:
    """All numbers that an entry can be, in float64."""
    every = torch.arange(256, dtype=torch.uint8).view(entry).double()
    return every[every.isfinite() & (every.abs() <= LARGEST[entry])].unique()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_the_nearest_that_there_is(entry: torch.dtype) -> None:
    x = heads()
    entries, scales = quantize(x, entry)
    scaled = x.double() / scales.double()[:, None]
    nearest = (scaled[..., None] - grid(entry)).abs().amin(-1)
    error = (scaled - entries.double()).abs()
    assert (error <= nearest * (1 + 1e-4) + 1e-6).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_scale_is_as_small_as_bfloat16_allows(entry: torch.dtype) -> None:
    x = heads()
    _, scales = quantize(x, entry)
    least = x.double().abs().amax(-1) / LARGEST[entry]
    assert (scales.double() >= least * (1 - 1e-6)).all()
    assert (scales.double() <= least * (1 + 2.0**-7)).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_values_are_kept_to_half_a_step(entry: torch.dtype) -> None:
    """FP8 has 3 bits behind the first, down to a 2^15th of the largest; INT8 steps of a 127th."""
    x = heads().double()
    entries, scales = quantize(x.float(), entry)
    error = (entries.double() * scales.double()[:, None] - x.float().double()).abs()
    largest = x.abs().amax(-1, keepdim=True)
    if entry == FP8:
        bound = torch.maximum(x.abs() * 2.0**-4, largest * 2.0**-17)
    else:
        bound = largest / 254
    assert (error <= bound * 1.01).all()


@pytest.mark.parametrize("entry", ENTRIES)
def test_zeros_and_values_too_small_for_a_scale_are_zeros(entry: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-40, -1e-38], [3e38, -3e38]])
    entries, scales = quantize(x, entry)
    assert entries[:2].double().eq(0).all()
    assert scales.isfinite().all() and (scales > 0).all()
    assert entries[2].double().tolist() == [LARGEST[entry], -LARGEST[entry]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_not_finite_spoils_its_own_head_alone(entry: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    entries, scales = quantize(x, entry)
    assert scales.isnan().tolist() == [False, True, False]
    values = entries.float() * scales.float()[:, None]
    assert values[1].isnan().all()
    assert torch.allclose(values[[0, 2]], torch.ones(2, 4), rtol=0.01)


def test_a_layer_is_a_whole_number_of_loads() -> None:
    for sizes in ((1, 1, 16), (3, 8, 80), (8, 16, 128), (1, 5, 66)):
        form = LayerFormat(*sizes, torch.bfloat16, FP8)
        assert form.num_bytes % 16 == 0
        kv_heads, page_tokens, head_dim = sizes
        assert 0 <= form.num_bytes - 2 * kv_heads * page_tokens * (head_dim + 2) < 16


@pytest.mark.parametrize("entry", ENTRIES)
def test_pages_hold_entries_and_scales_of_their_layer(entry: torch.dtype) -> None:
    form = LayerFormat(2, 4, 8, torch.bfloat16, entry)
    layer = form.pages(torch.zeros(3, 48 + form.num_bytes, dtype=torch.uint8), 32)
    x = torch.randn(3, 2, 2, 4, 8, generator=torch.Generator().manual_seed(2))
    entries, scales = quantize(x, entry)
    layer.entries.copy_(entries)
    assert layer.scales is not None
    layer.scales.copy_(scales)
    values = dequantize(layer, torch.float64)
    assert torch.equal(values, entries.double() * scales.double()[..., None])
    assert (values - x).norm() / x.norm() < 0.04
