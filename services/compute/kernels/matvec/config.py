"""How a product is cut into programs, by its shape: pure, and the same for every number of rows."""

from __future__ import annotations

from dataclasses import dataclass

ROW_COUNTS = (1, 2, 4)
"""How many rows the kernels take."""

PROGRAMS = 264
"""Two for each of the 132 multiprocessors of an H100 or H200."""

TILE_BYTES = 32 << 10
"""Weights a program asks for at once."""

STAGED_BYTES = 64 << 10
"""Weights on their way to a program. With two programs that is 128 KiB a multiprocessor, of 227 KiB
of shared memory: three times the 40 KiB that 4.5 TB/s with a microsecond's latency needs."""

MAX_STAGES = 6
MAX_ROWS = 16
MAX_WARPS = 16

WARP_BYTES = 1 << 10
"""Of an input row, for each warp: two loads of 16 bytes a thread."""

SMALL_TILE_BYTES = 8 << 10
"""The same where the weight is so small that larger tiles leave programs without work."""

MIN_BLOCKS_PER_PROGRAM = 4
"""With fewer, the programs that have one block more take up to a third longer than the rest."""

MAX_RESIDENT_INPUTS = 4096
"""A product alone takes wider inputs step by step: four rows of them crowd the registers."""

LINE_BYTES = 128
PREFETCH_LINES = 32
"""Cache lines of each row that a waiting program asks for: 16 KiB of a block of four rows, 128 KiB
for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class MatvecConfig:
    """Constants of one launch."""

    rows: int  # output rows of a block, a power of two
    num_warps: int
    num_stages: int
    programs: int = PROGRAMS  # at most; unused where block_in is set
    block_in: int = 0  # inputs of a step; 0: all at once, held in registers


def matvec_config(num_out: int, num_in: int, itemsize: int) -> MatvecConfig:
    """For a product alone."""
    if padded(num_in) > MAX_RESIDENT_INPUTS:
        return MatvecConfig(rows=4, num_warps=4, num_stages=4, block_in=2048 // itemsize)
    return norm_matvec_config(num_out, num_in, itemsize)


def norm_matvec_config(num_out: int, num_in: int, itemsize: int) -> MatvecConfig:
    """For a product whose input is normalised first."""
    return _resident(num_out, padded(num_in) * itemsize, tiles=1)


def gate_up_config(num_gates: int, num_in: int, itemsize: int) -> MatvecConfig:
    """For `num_gates` pairs of a gate and an up row: a block's tile is two of `rows`."""
    return _resident(num_gates, padded(num_in) * itemsize, tiles=2)


def padded(num_in: int) -> int:
    """The power of two that holds an input."""
    return 1 << max(num_in - 1, 0).bit_length()


def prefetch_lines(num_in: int, itemsize: int) -> int:
    """A power of two."""
    return max(1, min(PREFETCH_LINES, padded(num_in) * itemsize // LINE_BYTES))


def _resident(num_out: int, row_bytes: int, tiles: int) -> MatvecConfig:
    rows = max(1, min(MAX_ROWS, TILE_BYTES // (tiles * row_bytes)))
    while rows > 1 and tiles * rows * row_bytes > SMALL_TILE_BYTES:
        if num_out >= rows * PROGRAMS * MIN_BLOCKS_PER_PROGRAM:
            break
        rows //= 2
    return MatvecConfig(
        rows=rows,
        num_warps=max(1, min(MAX_WARPS, row_bytes // WARP_BYTES)),
        num_stages=max(2, min(MAX_STAGES, STAGED_BYTES // (tiles * rows * row_bytes) + 1)),
    )
