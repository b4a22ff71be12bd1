"""Latents and the rotated parts of keys are stored as the reference stores them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import FP8, INT8, dequantize
from services.compute.kernels.mla.latent_entries import (
    LatentNorms,
    store_latents,
    store_latents_reference,
)
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.layers.weighted_layers import Norm
from tests.kernels.quantized_pages import layer_of

NUM_TOKENS, PAGE_TOKENS, NUM_PAGES = 9, 4, 5
SIZES = [(32, 16, 24), (48, 8, 40)]  # of the latent, of the rotated part, of the queries' latent
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_query_norm", [True, False])
@pytest.mark.parametrize("entry", [None, FP8, INT8])
def test_what_is_stored(
    sizes: tuple[int, int, int],
    has_query_norm: bool,
    entry: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A token of the padding is not, and what no token is stored to stays."""
    torch.manual_seed(0)
    rank, rotated, queries = sizes
    down = torch.randn(NUM_TOKENS, queries + rank + rotated).to(device, dtype)
    positions = torch.randint(0, 30, (NUM_TOKENS,), dtype=torch.int32).to(device)
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS)[:NUM_TOKENS]
    slots[-1] = -1
    slots = slots.to(device)
    tables = RotaryTables(*torch.randn(2, 30, rotated // 2, device=device))
    query = Norm((1 + torch.rand(queries)).to(device, dtype), 1e-2) if has_query_norm else None
    norms = LatentNorms(Norm((1 + torch.rand(rank)).to(device, dtype), 1e-3), query)

    def run(store: Callable[..., None]) -> tuple[Tensor, ...]:
        pages = torch.full((NUM_PAGES, 1, 1, PAGE_TOKENS, rank + rotated), 7.0)
        layer = layer_of(pages.to(device, dtype), entry, rank)
        q = torch.zeros(NUM_TOKENS, queries).to(down)
        out = q if has_query_norm else None
        store(down, positions, slots, tables, norms, layer.entries, out, scales=layer.scales)
        return dequantize(layer, torch.float32, rank), q

    bound = BOUNDS[dtype] if entry is None else 0.1  # a step between entries
    for found, expected in zip(run(store_latents), run(store_latents_reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
