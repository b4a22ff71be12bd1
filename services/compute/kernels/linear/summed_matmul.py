"""The product that ends a part, with the same bits however many ranks share its inputs.

The inputs are cut into eight segments, of which a rank of a split model has all, four, two or one.
Each segment is added up in float32 from its first input to its last, and the segments' sums as a
binary tree (tree_sum.py). A rank leaves the sum of its subtree, in float32; those above are added
where the ranks meet (rank_rows.py). A bias belongs to the first segment.

The tree leaves open how many programs share a tile. Of few tiles each program has a segment or two,
and whichever ends last adds up what all have left.

Shape legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.linear.matmul import FLOAT32, GROUP_ROWS, Tile
from services.compute.kernels.linear.matvec_config import NUM_SMS
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.ranks.add_to_tree import add_to_tree
from services.compute.kernels.ranks.tree_sum import tree_sum

HALF = Tile(rows=64, columns=64, depth=128, num_warps=4, num_stages=3)
"""Two programs fit a multiprocessor: one computes while the other waits or ends a segment."""

PROGRAMS = 2 * NUM_SMS
"""Up to here tiles are split."""


def tile_of(segment_inputs: int, dtype: torch.dtype) -> Tile:
    """The one for segments of so many inputs, of which short ones are one shorter step."""
    tile = FLOAT32 if dtype == torch.float32 else HALF
    return replace(tile, depth=min(tile.depth, max(16, triton.next_power_of_2(segment_inputs))))


def is_even(num_in: int, num_segments: int, tile: Tile) -> bool:
    """Whether all segments are whole steps."""
    return num_in % (num_segments * tile.depth) == 0


def splits_of(num_tiles: int, num_segments: int, most: int) -> int:
    """Programs that share a tile, so that there are at most so many."""
    splits = 1
    while splits < num_segments and 2 * splits * num_tiles <= most:
        splits *= 2
    return splits


@triton.jit
def sum_of_segments(
    x_ptr,  # of the first row
    weight_ptr,  # likewise
    bias_ptr,  # or None
    t_in,
    o,
    first_segment,
    num_steps,  # of all segments
    I: tl.constexpr,  # noqa: E741  (the legend's)
    O: tl.constexpr,  # noqa: E741
    SEGMENT: tl.constexpr,  # inputs of one
    EVEN: tl.constexpr,  # segments are whole steps
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The tree's sum over the segments of so many steps, [T, O].

    All are one loop, so that loads of the next segment are on their way while one ends. How many
    there are is read when it runs: a loop of one step, unrolled, would be a product that begins
    with the sum before it, in place of zero.
    """
    STEPS: tl.constexpr = (SEGMENT + BLOCK_I - 1) // BLOCK_I
    i = tl.arange(0, BLOCK_I)
    o_in = (o < O)[None, :]
    # places in a tile have 32 bits: as pointers they would take twice the registers
    in_x = tl.arange(0, BLOCK_T)[:, None] * I + i[None, :]
    in_weight = tl.arange(0, BLOCK_O)[None, :] * I + i[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    one = total
    two = total
    four = total
    for index in range(0, num_steps):
        place = index // STEPS
        step = (index % STEPS) * BLOCK_I
        start = (first_segment + place) * SEGMENT + step
        if EVEN:
            x = tl.load(x_ptr + start + in_x, mask=t_in, other=0.0)
            weight = tl.load(weight_ptr + start + in_weight, mask=o_in, other=0.0)
        else:
            i_in = (step + i < SEGMENT) & (start + i < I)
            x = tl.load(x_ptr + start + in_x, mask=t_in & i_in[None, :], other=0.0)
            inside = o_in & i_in[:, None]
            weight = tl.load(weight_ptr + start + in_weight, mask=inside, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if index % STEPS == STEPS - 1:
            if bias_ptr is not None:
                if first_segment + place == 0:
                    bias_O = tl.load(bias_ptr + o, mask=o < O, other=0.0)
                    total += bias_O.to(tl.float32)[None, :]
            total, one, two, four = add_to_tree(total, one, two, four, place)
            if index < num_steps - 1:
                total = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _summed_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_tokens,
    num_steps,  # of a program
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
    SEGMENTS: tl.constexpr,  # of a program
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles_t = tl.cdiv(num_tokens, BLOCK_T)
    tiles_o: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    in_group = GROUP * tiles_o
    first = (tile // in_group) * GROUP
    group_t = tl.minimum(tiles_t - first, GROUP)
    first_t = (first + (tile % in_group) % group_t) * BLOCK_T
    first_o = ((tile % in_group) // group_t) * BLOCK_O
    t = first_t + tl.arange(0, BLOCK_T)
    o = first_o + tl.arange(0, BLOCK_O)
    t_in = (t < num_tokens)[:, None]
    total = sum_of_segments(
        x_ptr + first_t.to(tl.int64) * I, weight_ptr + first_o.to(tl.int64) * I, bias_ptr, t_in, o,
        split * SEGMENTS, num_steps,
        I, O, SEGMENT, EVEN, BLOCK_T, BLOCK_O, BLOCK_I, WIDEN,
    )  # fmt: skip
    out_ptrs = out_ptr + t.to(tl.int64)[:, None] * O + o[None, :]
    inside = t_in & (o < O)[None, :]
    if SPLITS == 1:
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        SIZE: tl.constexpr = BLOCK_T * BLOCK_O
        in_tile = tl.arange(0, BLOCK_T)[:, None] * BLOCK_O + tl.arange(0, BLOCK_O)[None, :]
        partial_ptrs = partial_ptr + tile * (SPLITS * SIZE) + in_tile
        tl.store(partial_ptrs + split * SIZE, total)
        # as split_tiles.store_last: all have written before the one that says so releases it
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + tile, 0)
            one = total
            two = total
            four = total
            for other in tl.static_range(SPLITS):
                total = tl.load(partial_ptrs + other * SIZE, cache_modifier=".cg")
                total, one, two, four = add_to_tree(total, one, two, four, other)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def summed_matmul(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    num_segments: int,
    work: SkinnyWork,
    tile: Tile | None = None,
    splits: int = 0,
) -> None:
    """out = x W^T + b of inputs that are so many segments: 1, 2, 4 or 8.

    x and the weight are of one dtype; out, which is rounded to once, may be of another. All are
    contiguous. Every tile and `splits` that divides the segments gives the same bits, but for the
    depth of tiles; they are there to be measured.
    """
    num_tokens, (num_out, num_in) = len(x_TI), weight_OI.shape
    assert x_TI.shape[1] == num_in and out_TO.shape == (num_tokens, num_out)
    segment_inputs = triton.cdiv(num_in, num_segments)
    tile = tile or tile_of(segment_inputs, x_TI.dtype)
    tiles = triton.cdiv(num_tokens, tile.rows) * triton.cdiv(num_out, tile.columns)
    room = min(work.partial.numel() // (tile.rows * tile.columns), work.arrivals.numel())
    splits = splits or splits_of(tiles, num_segments, min(PROGRAMS, room))
    _summed_kernel[(tiles, splits)](
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        work.partial,
        work.arrivals,
        num_tokens,
        num_segments // splits * triton.cdiv(segment_inputs, tile.depth),
        I=num_in,
        O=num_out,
        SEGMENT=segment_inputs,
        EVEN=is_even(num_in, num_segments, tile),
        SEGMENTS=num_segments // splits,
        SPLITS=splits,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.depth,
        GROUP=GROUP_ROWS,
        # the interpreter multiplies bf16 by its bits
        WIDEN=x_TI.device.type == "cpu",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def summed_reference(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, num_segments: int
) -> None:
    """The same segments and the same tree, of torch's products."""
    size = -(-weight_OI.shape[1] // num_segments)
    pairs = zip(x_TI.float().split(size, 1), weight_OI.float().split(size, 1), strict=True)
    sums = [x_TS @ weight_OS.t() for x_TS, weight_OS in pairs]
    sums += [torch.zeros_like(sums[0])] * (num_segments - len(sums))
    if bias_O is not None:
        sums[0] += bias_O.float()
    out_TO.copy_(tree_sum(sums))
