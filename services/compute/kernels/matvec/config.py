"""How a product is cut into programs, by its shape: pure, and the same for every number of rows."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 264
"""Two for each of the 132 multiprocessors of an H100 or H200."""

TILE_BYTES = 32 << 10
"""Weights a program asks for at once."""

STAGED_BYTES = 64 << 10
"""Weights on their way to a program. With two programs that is 128 KiB a multiprocessor, of 227 KiB
of shared memory: three times the 40 KiB that 4.5 TB/s with a microsecond's latency needs."""

MAX_STAGES = 6

SMALL_TILE_BYTES = 8 << 10
"""The same where the weight is so small that larger tiles leave programs without work."""

MIN_BLOCKS_PER_PROGRAM = 4
"""With fewer, the programs that have one block more take up to a third longer than the rest."""

MAX_RESIDENT_INPUTS = 8192
"""Wider inputs do not fit in the registers beside the weights (4 rows, 8 warps)."""


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
    row_bytes = padded(num_in) * itemsize
    rows = _rows(num_out, row_bytes)
    return MatvecConfig(rows, num_warps=_warps(row_bytes), num_stages=_stages(rows * row_bytes))


def gate_up_config(num_gates: int, num_in: int, itemsize: int) -> MatvecConfig:
    """For `num_gates` pairs of a gate and an up row: a block's tile is two of `rows`."""
    row_bytes = 2 * padded(num_in) * itemsize
    rows = _rows(num_gates, row_bytes)
    return MatvecConfig(rows, num_warps=_warps(row_bytes), num_stages=_stages(rows * row_bytes))


def padded(num_in: int) -> int:
    """The power of two that holds an input."""
    return 1 << max(num_in - 1, 0).bit_length()


def _rows(num_out: int, row_bytes: int) -> int:
    rows = max(1, min(16, TILE_BYTES // row_bytes))
    while rows * row_bytes > SMALL_TILE_BYTES and rows > 1:
        if num_out >= rows * PROGRAMS * MIN_BLOCKS_PER_PROGRAM:
            break
        rows //= 2
    return rows


def _warps(row_bytes: int) -> int:
    # a load of 16 bytes a thread and row, twice at least
    return max(1, min(8, row_bytes // (32 * 32)))


def _stages(tile_bytes: int) -> int:
    return max(2, min(MAX_STAGES, STAGED_BYTES // tile_bytes + 1))
