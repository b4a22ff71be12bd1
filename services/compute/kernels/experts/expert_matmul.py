"""Products of rows with the maps of their experts: a tile of rows is of one expert.

The first of an expert's two products takes rows of tokens and writes those of pairs in the order of
experts, its gating in the launch; the second writes pairs where `combine` finds a token's together.

A row's sums follow from the row and from the launch's constants. Weights are the taller operand.

Shape legend: T tokens, K experts of a token, R = T * K pairs, X experts, I inputs, O outputs,
F gates, G groups of a step's inputs, B bytes of its codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.experts.expert_matmul_config import (
    ExpertConfig,
    ExpertStack,
    can_step,
)
from services.compute.kernels.experts.sort_experts import ExpertOrder, tile_rows
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.weight_tiles import (
    WeightForm,
    add_products,
    finished,
    row_operand,
    step_weights,
    weight_operands,
)
from services.compute.kernels.rows.activations import gated_rounded
from services.compute.quantization.packed import Packed, can_multiply

if TYPE_CHECKING:
    from services.compute.layers.parts import Gating


@triton.jit(do_not_specialize=["num_tiles"])
def _expert_kernel(
    x_desc, x_ptr, code_desc, scale_desc, zero_desc, code_ptr, scale_ptr, zero_ptr, bias_ptr,
    out_ptr, order_ptr, tile_ptr, num_tiles,
    NUM_OUT: tl.constexpr,  # of an expert; of gates, with a gating
    NUM_IN: tl.constexpr,
    K: tl.constexpr,  # 0: rows are pairs in order
    FORM: tl.constexpr,
    GATING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Gates and ups are one product, but for weights that tensor cores read where they were copied
    # to.
    TOGETHER: tl.constexpr = GATING is not None and FORM[0] is not None
    PARTS: tl.constexpr = 2 if TOGETHER else 1
    ROWS: tl.constexpr = PARTS * BLOCK_O
    SUMS_X: tl.constexpr = FORM[3] and (FORM[2] == 1 or FORM[2] * BLOCK_I <= NUM_IN)
    OF_STEPS: tl.constexpr = FORM[2] > 1  # sums of x
    tile = tl.program_id(1)
    expert = tl.load(tile_ptr + tile)
    if expert >= 0:
        first, is_row_T, in_row_T, out_row_T = tile_rows(
            order_ptr, tile_ptr, tile, num_tiles, BLOCK_T, K
        )
        first_o = tl.program_id(0) * BLOCK_O
        slab = expert
        if GATING is not None:
            slab = 2 * expert
        i = tl.arange(0, BLOCK_I)
        x_ptrs = x_ptr + in_row_T.to(tl.int64)[:, None] * NUM_IN + i[None, :]

        total = tl.zeros((ROWS, BLOCK_T), dtype=tl.float32)
        up_total = total
        x_sum_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
        for step in tl.range(0, (NUM_IN + BLOCK_I - 1) // BLOCK_I, num_stages=STAGES):
            w_OI, scale_OG, zero_OG = step_weights(
                code_desc, scale_desc, zero_desc, code_ptr, scale_ptr, zero_ptr, slab, first_o,
                step, x_ptr.dtype.element_ty, ROWS, NUM_OUT, NUM_IN, BLOCK_I, PARTS, FORM,
            )  # fmt: skip
            start = step * BLOCK_I
            if x_desc is not None:
                x_TI = x_desc.load([first, start])
            else:
                inside = is_row_T[:, None]
                if NUM_IN % BLOCK_I != 0:
                    inside = inside & (start + i < NUM_IN)[None, :]
                x_TI = tl.load(x_ptrs + start, mask=inside, other=0.0)
            if SUMS_X:
                step_sum_T = tl.sum(x_TI.to(tl.float32), axis=1)
                x_sum_T = step_sum_T if OF_STEPS else x_sum_T + step_sum_T
            total = add_products(total, w_OI, scale_OG, zero_OG, x_TI, x_sum_T, FORM)
            if GATING is not None and not TOGETHER:
                w_OI, scale_OG, zero_OG = step_weights(
                    code_desc, scale_desc, zero_desc, code_ptr, scale_ptr, zero_ptr, slab + 1,
                    first_o, step, x_ptr.dtype.element_ty, ROWS, NUM_OUT, NUM_IN, BLOCK_I, PARTS,
                    FORM,
                )  # fmt: skip
                up_total = add_products(up_total, w_OI, scale_OG, zero_OG, x_TI, x_sum_T, FORM)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        total = finished(
            total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, slab, first_o, NUM_OUT, PARTS, FORM
        )
        if GATING is not None:
            if TOGETHER:
                both = tl.reshape(total, (2, BLOCK_O, BLOCK_T))
                total, up_total = tl.split(tl.permute(both, (1, 2, 0)))
            else:
                up_total = finished(
                    up_total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, slab + 1, first_o, NUM_OUT,
                    PARTS, FORM,
                )  # fmt: skip
            total = gated_rounded(total, up_total, GATING, x_ptr.dtype.element_ty)
        o = first_o + tl.arange(0, BLOCK_O)
        pointers = out_ptr + out_row_T.to(tl.int64)[:, None] * NUM_OUT + o[None, :]
        inside = is_row_T[:, None] & (o < NUM_OUT)[None, :]
        tl.store(pointers, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


def expert_gate_up(
    x_TE: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RF: Tensor,
    gating: Gating,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """Gates and ups of all pairs, gated, in the order of experts.

    The first half of an expert's rows are the gates. Rounded as by separate launches: gate and up,
    and what `gated_rounded` says.
    """
    num_pairs = order.num_pairs
    assert num_pairs % len(x_TE) == 0 and out_RF.shape == (num_pairs, stack.num_out // 2)
    _launch(x_TE, stack, order, out_RF, config, pdl, num_pairs // len(x_TE), gating)


def expert_down(
    inner_RF: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RE: Tensor,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """The products of rows in the order of experts, each to the row of its pair."""
    assert inner_RF.shape == (order.num_pairs, stack.num_in)
    assert out_RE.shape == (order.num_pairs, stack.num_out)
    _launch(inner_RF, stack, order, out_RE, config, pdl)


def _launch(
    x: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out: Tensor,
    config: ExpertConfig,
    pdl: bool,
    top_k: int = 0,
    gating: Gating | None = None,
) -> None:
    weight, num_out = stack.weight, out.shape[1]
    assert can_multiply(weight) and x.shape[1] == stack.num_in
    assert x.is_contiguous() and out.is_contiguous()
    assert config.block_rows == order.block_rows and order.num_experts == stack.num_experts
    assert can_step(weight, config.block_in)
    num_tiles = order.tiles_3N.shape[1]
    parts = 2 if gating is not None and isinstance(weight, Packed) else 1
    num_slabs = weight.shape[0] // num_out
    # Rows of codes' products are copied as these are, if they follow one another.
    copied = isinstance(weight, Packed) and not top_k
    _expert_kernel[(triton.cdiv(num_out, config.block_out), num_tiles)](
        row_operand(x, config.block_rows, config.block_in) if copied else None,
        x,
        *weight_operands(weight, num_slabs, parts, config.block_out, config.block_in),
        stack.bias_XO,
        out,
        order.order_R,
        order.tiles_3N,
        num_tiles,
        NUM_OUT=num_out,
        NUM_IN=stack.num_in,
        K=top_k,
        FORM=WeightForm.of(weight, x),
        GATING=gating,
        BLOCK_T=config.block_rows,
        BLOCK_O=config.block_out,
        BLOCK_I=config.block_in,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        **dependent_launch(pdl, out),
    )
