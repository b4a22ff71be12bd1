"""A linear map whose every row is bitwise the same in any batch, at any place in it.

Why a row cannot see its company:
 - The machine code is one for a weight's shape and dtype: the tile is chosen by these alone, and
   the number of tokens is a run-time integer that is never specialised (neither 1 nor a multiple
   of 16 makes another kernel).
 - A program adds up whole dot products, in one order of K: `depth` terms at a time from the first
   to the last. K is not split, so no sum's order depends on how many programs there are.
 - Rows meet only in a tile's matrix instructions, where an output element is made of its own row
   and its own column. Every row of a tile goes through the same instructions; rows beyond the last
   are zeros there, and are not stored.
 - Which program has which tile (grouped, for the cache's sake) decides when it is computed, but
   not how.

cuBLAS promises none of this across row counts: it chooses kernels, and splits of K, by the shape.

Shape legend: T tokens, I columns in, O columns out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

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


GROUP_ROWS = 8
"""Tiles of rows that share a weight tile while it is in the cache."""


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    I: tl.constexpr,  # noqa: E741  (the legend's)
    O: tl.constexpr,  # noqa: E741
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_t = tl.cdiv(num_tokens, BLOCK_T)
    tiles_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    in_group = GROUP * tiles_o
    first = (program // in_group) * GROUP
    group_t = tl.minimum(tiles_t - first, GROUP)
    tile_t = first + (program % in_group) % group_t
    tile_o = (program % in_group) // group_t

    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    t_in = (t < num_tokens)[:, None]
    o_in = (o < O)[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * I + i[None, :]
    weight_ptrs = weight_ptr + o.to(tl.int64)[None, :] * I + i[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for start in range(0, I, BLOCK_I):
        if I % BLOCK_I == 0:
            x = tl.load(x_ptrs, mask=t_in, other=0.0)
            weight = tl.load(weight_ptrs, mask=o_in, other=0.0)
        else:
            x = tl.load(x_ptrs, mask=t_in & (start + i < I)[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=o_in & (start + i < I)[:, None], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += BLOCK_I
        weight_ptrs += BLOCK_I
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=t_in & o_in)


def matmul(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    tile: Tile | None = None,
) -> None:
    """out = x W^T + b, added up in float32 (IEEE for float32 inputs) and rounded once.

    Inputs are of one dtype; out may be of another, as float32 logits are. All are contiguous. The
    tile is the weight's, if no other is given: that of a whole weight of which this is a part.
    """
    tile = tile or tile_for(weight_OI.shape[0], x_TI.dtype)
    num_tokens = x_TI.shape[0]
    num_out, num_in = weight_OI.shape
    tiles = triton.cdiv(num_tokens, tile.rows) * triton.cdiv(num_out, tile.columns)
    _matmul_kernel[(tiles,)](
        x_TI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_TO,
        num_tokens,
        I=num_in,
        O=num_out,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.depth,
        GROUP=GROUP_ROWS,
        HAS_BIAS=bias_O is not None,
        # the interpreter multiplies bf16 by its bits
        WIDEN=x_TI.device.type == "cpu",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def linear_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor
) -> None:
    """out = x W^T + b in float32 at least, rounded once to out's dtype."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    bias_O = None if bias_O is None else bias_O.to(wide)
    out_TO.copy_(F.linear(x_TI.to(wide), weight_OI.to(wide), bias_O))
