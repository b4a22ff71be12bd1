"""How products of many rows on Hopper are cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_OUT = 128
"""Rows of weights of a tile, 64 of each of two warpgroups; of gates and ups half of them each."""

BLOCK_IN = 64
"""Inputs of a step: 128 bytes, what a swizzled copy takes."""

CHUNK = 64
"""Tokens that are stored at once."""

GROUP = 8
"""Tiles of tokens that share a weight, one after the other."""

SHARED_BYTES = (227 << 10) - 512  # but for barriers, and what a warp leaves for the others
STAGING_BYTES = 2 * CHUNK * BLOCK_OUT  # for a chunk of results of both warpgroups on its way
ITEMSIZE = 2
HALVES = (torch.bfloat16, torch.float16)


class HopperTile(NamedTuple):
    """Tokens of a tile: a power of two, and a smaller one beside it or none."""

    main: int
    tail: int = 0

    @property
    def tokens(self) -> int:
        return self.main + self.tail

    @property
    def _step_bytes(self) -> int:
        return (BLOCK_OUT + self.tokens) * BLOCK_IN * ITEMSIZE

    @property
    def num_stages(self) -> int:
        return (SHARED_BYTES - STAGING_BYTES) // self._step_bytes

    @property
    def copies(self) -> int:
        """Chunks of a warpgroup on their way."""
        left = SHARED_BYTES - self.num_stages * self._step_bytes
        return min(2, left // STAGING_BYTES)


STEP_TIMES = {
    HopperTile(256, 32): 154,
    HopperTile(256): 128,
    HopperTile(128, 64): 101,
    HopperTile(128, 32): 93,
    HopperTile(128): 66,
}
"""Of the tiles that there are, as measured on an H100, in the cycles of one product by 256 tokens.
Smaller ones are no faster: they wait for weights, too."""

TILE_TOKENS = {tile.tokens for tile in STEP_TIMES}
"""Rows for which each of the tiles is the fastest, where weights have tiles for all of a device."""

MIN_EQUAL_INPUTS = 2048
"""From which on sums were seen to have the bits of `matmul`; those of 64 inputs had others."""


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Which weights such a GPU multiplies by more than 64 rows in this way, and how."""

    num_sms: int

    @classmethod
    def of(cls, device: torch.device) -> HopperTiling:
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def serves(self, weight_OI: Tensor) -> bool:
        """Whether a weight, or gates and ups, are what the kernel is written for."""
        num_rows, num_in = weight_OI.shape
        return weight_OI.dtype in HALVES and num_rows % 16 == num_in % 8 == 0

    def has_equal_bits(self, weight_OI: Tensor) -> bool:
        """Whether it does so with the bits of `matmul`, too."""
        return weight_OI.shape[1] >= MIN_EQUAL_INPUTS and self.serves(weight_OI)

    def suits(self, weight_2F_I: Tensor) -> bool:
        """Whether gates and ups with their activation are faster than cuBLAS and another launch.

        A matter of the weight alone: what one step has room for, steps of fewer rows have room for.
        """
        fills = 4 * len(weight_2F_I) >= 3 * BLOCK_OUT * self.num_sms
        return fills and self.serves(weight_2F_I)

    def num_rounds(self, tile: HopperTile, num_tokens: int, num_rows: int) -> int:
        """Of tiles, one for each multiprocessor."""
        num_tiles = -(-num_tokens // tile.tokens) * -(-num_rows // BLOCK_OUT)
        return -(-num_tiles // self.num_sms)

    def tile(self, num_tokens: int, num_rows: int) -> HopperTile:
        """That whose rounds take the least time together; of equals the largest, which fetches the
        fewest bytes."""

        def time(tile: HopperTile) -> int:
            return self.num_rounds(tile, num_tokens, num_rows) * STEP_TIMES[tile]

        return min(STEP_TIMES, key=time)
