"""How a matrix product is cut up: by the weight alone, never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MANY_COLUMNS = 12288
"""From here on wide tiles are enough programs for an H200's 132 multiprocessors at one row."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A program computes [rows, columns] of the product, `depth` terms of the sums at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


WIDE = Tile(rows=64, columns=128, depth=64, num_warps=4, num_stages=4)
NARROW = Tile(rows=64, columns=64, depth=128, num_warps=4, num_stages=4)
FLOAT32 = Tile(rows=32, columns=64, depth=32, num_warps=4, num_stages=3)


def tile_for(num_columns: int, dtype: torch.dtype) -> Tile:
    """The one tile for weights of this many rows, which are the columns of the product."""
    if dtype == torch.float32:
        return FLOAT32
    return WIDE if num_columns >= MANY_COLUMNS else NARROW
