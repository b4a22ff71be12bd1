"""How attention over latents is cut: heads into tiles, entries into blocks, rows into chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.compute.kernels.decode_plan import EXTRA_PROGRAMS

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


def extra_programs(num_heads: int) -> int:
    """Programs that a step may have beyond one for each row and tile.

    Where two fit a multiprocessor, 64 rows are cut into as many as run at once on an H200.
    """
    group = num_heads // head_tiles(num_heads)
    return EXTRA_PROGRAMS if group > FEW_ROWS else 2 * EXTRA_PROGRAMS - 64


@dataclass(frozen=True, slots=True)
class LatentTiling:
    """How a program walks through entries."""

    block_n: int
    num_warps: int
    num_stages: int
    tall: bool = False  # of decode rows: entries are the rows of products, not heads

    @staticmethod
    def of(dtype: torch.dtype, num_rows: int) -> LatentTiling:
        """Of tiles of so many rows; a block of 32 entries in 16 bits takes 36 KiB, and there is one
        less than stages."""
        if dtype == torch.float32:
            return LatentTiling(16, num_warps=8, num_stages=2)
        if num_rows <= FEW_ROWS:
            return LatentTiling(32, num_warps=4, num_stages=3)
        return LatentTiling(32, num_warps=8, num_stages=3)
