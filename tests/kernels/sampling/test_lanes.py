"""Counts by votes and scattered stores, against torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.compute.kernels.sampling.lanes import (
    INTERPRETED,
    NUM_LANES,
    add_counts,
    count_numbers,
    no_counts,
    scatter,
)
from services.compute.kernels.sampling.top_k_top_p_search import COLUMNS, TILE, tile_at


@triton.jit
def _count(words_ptr, counts_ptr, TILES: tl.constexpr, FAST: tl.constexpr):
    counts = no_counts(COLUMNS, FAST)
    for step in range(TILES):
        counts += count_numbers(tl.load(words_ptr + tile_at(step * TILE)), FAST)
    add_counts(counts_ptr, counts, FAST)


@triton.jit
def _scatter(words_ptr, out_ptr, FAST: tl.constexpr):
    ids = tile_at(0)
    words = tl.load(words_ptr + ids)
    scatter(out_ptr + (TILE - 1 - ids), words, words % 3 == 0, FAST)


def test_numbers_are_counted_whatever_the_other_bits_are(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (3 * 4096,), generator=generator).to(torch.int32)
    words[:2000] = 7 << 20
    counts = torch.ones(NUM_LANES, dtype=torch.int32, device=device)
    _count[(1,)](words.to(device), counts, TILES=3, FAST=not INTERPRETED, num_warps=8)
    expected = 1 + torch.bincount((words >> 20) & 31, minlength=NUM_LANES)
    assert counts.tolist() == expected.tolist()


def test_words_are_stored_where_the_mask_holds_and_nowhere_else(device: torch.device) -> None:
    words = torch.arange(4096, dtype=torch.int32)
    out = torch.full_like(words, -1, device=device)
    _scatter[(1,)](words.to(device), out, FAST=not INTERPRETED, num_warps=8)
    assert out.tolist() == torch.where(words % 3 == 0, words, -1).flip(0).tolist()
