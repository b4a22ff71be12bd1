"""Where the programs that share the inputs of a tile of outputs meet.

Each leaves its sums in memory, and whichever ends last adds up those of all, always in the same
order (the counter of stream-K and of split-KV attention).

Shape legend: T rows, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

MERGE_ELEMENTS = 16 << 10
"""Partial sums that the last program has in flight: 128 registers of each of 128 threads."""


def merged_at_once(splits: int, tile_size: int) -> int:
    """How many programs' sums of a tile the last one loads together."""
    return min(splits, max(1, MERGE_ELEMENTS // tile_size))


@triton.jit
def store_tile(
    out_ptr,
    bias_ptr,
    y,
    t,
    o,
    num_tokens,
    num_out,
    WEIGHT_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Rounded into rows of `num_out`."""
    y_TO = y
    if WEIGHT_FIRST:
        y_TO = tl.trans(y)
    if HAS_BIAS:
        bias_O = tl.load(bias_ptr + o, mask=o < num_out, other=0.0)
        y_TO += bias_O.to(tl.float32)[None, :]
    pointers = out_ptr + t[:, None].to(tl.int64) * num_out + o[None, :]
    real = (t < num_tokens)[:, None] & (o < num_out)[None, :]
    tl.store(pointers, y_TO.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def store_last(
    out_ptr,
    bias_ptr,
    partial_ptr,
    arrivals_ptr,
    total,
    t,
    num_tokens,
    num_out,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Leave this program's sums; the last of a tile adds those of all."""
    split = tl.program_id(0)
    tile = tl.program_id(1)
    in_tile_O = tl.arange(0, BLOCK_O)
    if WEIGHT_FIRST:
        place = in_tile_O[:, None] * BLOCK_T + t[None, :]
    else:
        place = t[:, None] * BLOCK_O + in_tile_O[None, :]
    SIZE: tl.constexpr = BLOCK_T * BLOCK_O
    pointers = partial_ptr + tile * (SPLITS * SIZE) + place
    tl.store(pointers + split * SIZE, total)  # a mask of rows would make it one word at a time
    # All threads' sums are written before the one thread that says so releases them; the program
    # that finds itself last acquires everybody's.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(arrivals_ptr + tile, 0)
        # past the first-level cache, which knows nothing of other programs' writes
        y = tl.zeros_like(total)
        for first in range(0, SPLITS, GROUP):
            for other in tl.static_range(GROUP):
                y += tl.load(pointers + (first + other) * SIZE, cache_modifier=".cg")
        o = tile * BLOCK_O + in_tile_O
        store_tile(out_ptr, bias_ptr, y, t, o, num_tokens, num_out, WEIGHT_FIRST, HAS_BIAS)
