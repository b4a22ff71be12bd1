"""The second product of experts, with the same bits however many ranks share their inner width.

Each row of a pair is the sum of eight segments as in summed_matmul.py: a rank that has a part of
every expert leaves the sum of its subtree. Rows come in the order of experts, a tile is one
expert's, and they go to those of their pairs.

Shape legend: R pairs of a token and an expert, X experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.experts.expert_matmul_config import ExpertStack
from services.compute.kernels.experts.sort_experts import ExpertOrder, tile_rows
from services.compute.kernels.linear.summed_matmul import is_even, sum_of_segments, tile_of


@triton.jit(do_not_specialize=["num_tiles", "num_steps"])
def _summed_expert_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    tile_ptr,
    num_tiles,
    num_steps,
    I: tl.constexpr,  # noqa: E741  (the legend's)
    O: tl.constexpr,  # noqa: E741
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_ptr + tile).to(tl.int64)
    if expert >= 0:
        first, is_row_T, in_row_T, out_row_T = tile_rows(
            order_ptr, tile_ptr, tile, num_tiles, BLOCK_T, 0
        )
        first_o = tl.program_id(0) * BLOCK_O
        o = first_o + tl.arange(0, BLOCK_O)
        expert_bias_ptr = bias_ptr
        if bias_ptr is not None:
            expert_bias_ptr = bias_ptr + expert * O
        t_in = is_row_T[:, None]
        total = sum_of_segments(
            x_ptr + first.to(tl.int64) * I, weight_ptr + (expert * O + first_o) * I,
            expert_bias_ptr, t_in, o, 0, num_steps,
            I, O, SEGMENT, EVEN, BLOCK_T, BLOCK_O, BLOCK_I, WIDEN,
        )  # fmt: skip
        out_ptrs = out_ptr + out_row_T.to(tl.int64)[:, None] * O + o[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=t_in & (o < O)[None, :])


def summed_expert_down(
    inner_RI: Tensor, stack: ExpertStack, order: ExpertOrder, out_RO: Tensor, num_segments: int
) -> None:
    """The products of rows in the order of experts, each to the row of its pair; `out` may be of
    another dtype. Weights are not packed."""
    weight, num_in, num_out = stack.weight, stack.num_in, stack.num_out
    assert isinstance(weight, Tensor) and order.num_experts == stack.num_experts
    assert inner_RI.shape == (order.num_pairs, num_in)
    assert out_RO.shape == (order.num_pairs, num_out)
    segment_inputs = triton.cdiv(num_in, num_segments)
    tile = replace(tile_of(segment_inputs, inner_RI.dtype), rows=order.block_rows)
    num_tiles = order.tiles_3N.shape[1]
    _summed_expert_kernel[(triton.cdiv(num_out, tile.columns), num_tiles)](
        inner_RI,
        weight,
        stack.bias_XO,
        out_RO,
        order.order_R,
        order.tiles_3N,
        num_tiles,
        num_segments * triton.cdiv(segment_inputs, tile.depth),
        I=num_in,
        O=num_out,
        SEGMENT=segment_inputs,
        EVEN=is_even(num_in, num_segments, tile),
        BLOCK_T=tile.rows,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.depth,
        # the interpreter multiplies bf16 by its bits
        WIDEN=inner_RI.device.type == "cpu",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
