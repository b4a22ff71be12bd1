"""Latents and the rotated parts of keys are stored as the reference stores them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.compute.kernels.latent_entries import (
    LatentNorms,
    store_latents,
    store_latents_reference,
)
from services.compute.kernels.rotate_and_store import RotaryTables
from services.compute.layers.weighted_layers import Norm

NUM_TOKENS, PAGE_TOKENS, NUM_PAGES = 9, 4, 5
SIZES = [(32, 16, 24), (48, 8, 40)]  # of the latent, of the rotated part, of the queries' latent
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_query_norm", [True, False])
def test_what_is_stored(
    sizes: tuple[int, int, int], has_query_norm: bool, dtype: torch.dtype, device: torch.device
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
        pages = torch.full((NUM_PAGES, 2, 1, PAGE_TOKENS, rank + rotated), 7.0)
        pages = pages.to(device, dtype)
        q = torch.zeros(NUM_TOKENS, queries).to(down)
        entries = torch.zeros(NUM_TOKENS, rank + rotated).to(down)
        # two layers in a page, of which this is the second; whatever is asked for
        more: tuple[Tensor | None, ...] = (q, entries) if has_query_norm else (None, None)
        store(down, positions, slots, tables, norms, pages[:, 1:], more[0], entries_TW=more[1])
        return pages, q, entries

    bound = BOUNDS[dtype]
    for found, expected in zip(run(store_latents), run(store_latents_reference), strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
