"""How the kernel is cut up, by data type and head width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PROGRAMS_PER_SM = 8
"""Launched at most. A program takes several tiles when there are more, so that a bucket's surplus
programs stay few (each holds a place on its SM for about 1 µs) and the hardware still balances."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tile: `block_m` rows (queries times heads of a group) by `block_n` keys.

    `block_n` decides the order of the sums, so results are bitwise comparable only where it is
    the same. It must not depend on anything that changes between steps.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = PROGRAMS_PER_SM


NARROW = Tiling(block_m=128, block_n=64, num_warps=8, num_stages=3)
"""Half precision, heads up to 64. On an H200 37 prompts of 220 tokens take 61 us in these tiles and
107 in 128 x 128; only a chunk after a long prefix is slower in them (98 us against 80)."""
MIDDLE = Tiling(block_m=64, block_n=64, num_warps=4, num_stages=2)
"""Half precision, heads up to 128. 4096 tokens take 360 us (382 TFLOP/s) and 381 in 128 x 64, 37
prompts of 220 tokens 121 and 138: two programs fit a multiprocessor."""
WIDE = Tiling(block_m=128, block_n=64, num_warps=8, num_stages=2)
"""Half precision, heads up to 256: 192 KiB of the 227 KiB of shared memory."""
FLOAT32 = Tiling(block_m=64, block_n=32, num_warps=8, num_stages=2)
"""IEEE products, which tensor cores do not have: for checking, not for speed."""
FLOAT32_WIDE = Tiling(block_m=32, block_n=32, num_warps=8, num_stages=2)


def tiling_of(dtype: torch.dtype, head_width: int) -> Tiling:
    """The tile for these heads."""
    if dtype == torch.float32:
        return FLOAT32 if head_width <= 128 else FLOAT32_WIDE
    if head_width <= 64:
        return NARROW
    return MIDDLE if head_width <= 128 else WIDE
