"""How attention over latents is cut: heads into tiles, entries into blocks, rows into chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.compute.kernels.attention.decode_plan import EXTRA_PROGRAMS

MAX_GROUP = 64
"""Heads of a tile at most: their sums take half of a multiprocessor's registers."""

FEW_ROWS = 16
"""Rows of a tile up to which two programs fit a multiprocessor."""


def head_tiles(num_heads: int) -> int:
    """How many tiles the heads of a query are, all of one size."""
    tiles = -(-num_heads // MAX_GROUP)
    while num_heads % tiles:
        tiles += 1
    return tiles


def programs_at_once(num_heads: int) -> int:
    """Decode programs that an H200 has room for.

    Steps have as many shares of all positions (`one_wave` of DecodeWork). 64 rows with 16 heads are
    cut into four parts each, and take 20 µs at 420 tokens and 87 at 4,096, for 25 and 177 uncut;
    with 128 heads they are not cut, and take 46 and 270, for 72 and 314 cut in two.
    """
    group = num_heads // head_tiles(num_heads)
    return EXTRA_PROGRAMS if group > FEW_ROWS else 2 * EXTRA_PROGRAMS


@dataclass(frozen=True, slots=True)
class LatentTiling:
    """How a program walks through entries."""

    block_n: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(dtype: torch.dtype, num_rows: int, has_codes: bool) -> LatentTiling:
        """Of tiles of so many rows; a block of 32 entries in 16 bits takes 36 KiB, and there is one
        less than stages. Of entries of 8 bits the decoded ones take registers, too.

        64 rows of 4,096 tokens with 128 heads take 270 µs in blocks of 64 for 314 in those of 32,
        a chunk of 4,096 tokens with 16 heads 1,044 for 1,447.
        """
        if dtype == torch.float32:
            return LatentTiling(16, num_warps=8, num_stages=2)
        if num_rows <= FEW_ROWS:
            return LatentTiling(32, num_warps=4, num_stages=3)
        if has_codes:
            return LatentTiling(32, num_warps=8, num_stages=3)
        return LatentTiling(64, num_warps=8, num_stages=2)
