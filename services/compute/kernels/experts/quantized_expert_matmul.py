"""Products of quantized rows with the codes of their experts, on tensor cores of 8 bits.

The tiles of expert_matmul with the arithmetic of quantized_matmul: codes are multiplied as they
are, and after some inputs the sums of FP8 go on in float32. Weights, their scales and rows that
follow one another are copied by the multiprocessor's own engine (TMA), many steps ahead; rows of
tokens, which an expert has here and there, by threads.

Shape legend: T rows of a tile, R pairs of a token and an expert, X experts, I inputs of a step,
E inputs, O outputs, F gates, G groups of inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.compute.kernels.experts.expert_matmul_config import ExpertConfig, ExpertStack
from services.compute.kernels.experts.quantized_expert_config import emits_codes, expert_row_form
from services.compute.kernels.experts.sort_experts import ExpertOrder, tile_rows
from services.compute.kernels.kv.kv_entries import encode
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rows.activations import gated_rounded
from services.compute.kernels.rows.quantized_rows import (
    SCALE_GROUP,
    QuantizedRows,
    RowPointers,
    group_scales,
)
from services.compute.quantization.packed import Packed

if TYPE_CHECKING:
    from services.compute.layers.parts import Gating

MANY_ROWS = tl.constexpr(64)
"""From here on rows are the taller operand. Of the shorter one each thread holds many scales: those
of weights are copied with them, but those of rows are loads of their own."""


@triton.jit
def _x_scales(x_scale_ptr, in_row_T, is_row_T, num_in_rows, step, BY_GROUP: tl.constexpr):
    """Of a step's inputs."""
    x_scale_T = tl.zeros(in_row_T.shape, dtype=tl.float32)
    if BY_GROUP:
        place_T = step * num_in_rows + in_row_T
        x_scale_T = tl.load(x_scale_ptr + place_T, mask=is_row_T, other=0.0)
    return x_scale_T


@triton.jit
def _products(
    codes, x_TI, sums, CARRIED: tl.constexpr, ROWS_FIRST: tl.constexpr, WIDEN: tl.constexpr
):
    """Of a step, or sums of all steps so far."""
    DTYPE: tl.constexpr = sums.dtype
    if not CARRIED:
        sums = tl.zeros(sums.shape, dtype=DTYPE)
    if WIDEN:  # the interpreter
        wide = tl.dot(codes.to(tl.float32), tl.trans(x_TI.to(tl.float32)), input_precision="ieee")
        if ROWS_FIRST:
            wide = tl.trans(wide)
        sums += wide.to(DTYPE)
    elif ROWS_FIRST:
        sums = tl.dot(x_TI, tl.trans(codes), sums, out_dtype=DTYPE)
    else:
        sums = tl.dot(codes, tl.trans(x_TI), sums, out_dtype=DTYPE)
    return sums


@triton.jit
def _of_rows(value_T, ROWS_FIRST: tl.constexpr):
    """Beside sums: [T, 1] or [1, T]."""
    return value_T[:, None] if ROWS_FIRST else value_T[None, :]


@triton.jit
def _of_outputs(value_O, ROWS_FIRST: tl.constexpr):
    return value_O[None, :] if ROWS_FIRST else value_O[:, None]


@triton.jit
def _added(
    total, sums, x_scale_T, scale_desc, first_row, group,
    CARRIED: tl.constexpr, BY_GROUP: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """The total with a step's sums, times the scales of its groups."""
    if not CARRIED:
        y = sums.to(tl.float32)
        if scale_desc is not None:
            scale = scale_desc.load([group, first_row]).to(tl.float32)
            y *= scale if ROWS_FIRST else tl.trans(scale)
            if BY_GROUP:
                y *= _of_rows(x_scale_T, ROWS_FIRST)
        total += y
    return total


@triton.jit
def _scaled(
    total, x_scale_T, scale_ptr, bias_ptr, row_O, SCALE_O: tl.constexpr, OF_ROWS: tl.constexpr,
    BY_GROUP: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """The total with the scales that all inputs have in common, and with biases."""
    if OF_ROWS:
        scale_O = tl.load(scale_ptr + row_O.to(tl.int64) * SCALE_O).to(tl.float32)
        total *= _of_outputs(scale_O, ROWS_FIRST)
    if not BY_GROUP:
        total *= _of_rows(x_scale_T, ROWS_FIRST)
    if bias_ptr is not None:
        total += _of_outputs(tl.load(bias_ptr + row_O).to(tl.float32), ROWS_FIRST)
    return total


@triton.jit(do_not_specialize=["num_in_rows", "num_tiles"])
def _quantized_expert_kernel(
    x_desc, x_ptr, x_scale_ptr, code_desc, scale_desc, scale_ptr, bias_ptr, out_ptr,
    out_scale_ptr, order_ptr, tile_ptr, num_in_rows, num_tiles,
    NUM_OUT: tl.constexpr,  # of an expert; of gates, with a gating
    NUM_IN: tl.constexpr,
    K: tl.constexpr,  # 0: rows are pairs in order, and go to their places
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # stride of scales
    IS_FLOAT: tl.constexpr,
    BY_GROUP: tl.constexpr,  # scales of rows
    GATING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # in this order, so that programs of later launches do not take multiprocessors' room
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    CARRIED: tl.constexpr = not IS_FLOAT and G == 1  # exact over all inputs
    DTYPE: tl.constexpr = tl.float32 if IS_FLOAT else tl.int32
    EMITS: tl.constexpr = out_scale_ptr is not None
    STEPS: tl.constexpr = NUM_IN // BLOCK_I
    ROWS_FIRST: tl.constexpr = BLOCK_T >= MANY_ROWS
    M: tl.constexpr = BLOCK_T if ROWS_FIRST else BLOCK_O
    N: tl.constexpr = BLOCK_O if ROWS_FIRST else BLOCK_T
    tile = tl.program_id(1)
    expert = tl.load(tile_ptr + tile)
    if expert >= 0:
        first, is_row_T, in_row_T, out_row_T = tile_rows(
            order_ptr, tile_ptr, tile, num_tiles, BLOCK_T, K
        )
        first_o = tl.program_id(0) * BLOCK_O
        first_expert_row = expert * NUM_OUT
        if GATING is not None:
            first_expert_row = expert * (2 * NUM_OUT)
        first_row = first_expert_row + first_o
        i = tl.arange(0, BLOCK_I)
        x_ptrs = x_ptr + in_row_T.to(tl.int64)[:, None] * NUM_IN + i[None, :]

        total = tl.zeros((M, N), dtype=tl.float32)
        sums = tl.zeros((M, N), dtype=DTYPE)
        up_total = total
        up_sums = sums
        x_scale_T = _x_scales(x_scale_ptr, in_row_T, is_row_T, num_in_rows, 0, BY_GROUP)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            codes = code_desc.load([first_row, step * BLOCK_I])
            if x_desc is not None:  # with rows of other experts behind the last
                x_TI = x_desc.load([first, step * BLOCK_I])
            else:
                x_TI = tl.load(x_ptrs + step * BLOCK_I, mask=is_row_T[:, None])
            group = step // (STEPS // G)
            sums = _products(codes, x_TI, sums, CARRIED, ROWS_FIRST, WIDEN)
            if GATING is not None:
                up_codes = code_desc.load([first_row + NUM_OUT, step * BLOCK_I])
                up_sums = _products(up_codes, x_TI, up_sums, CARRIED, ROWS_FIRST, WIDEN)
                up_total = _added(
                    up_total, up_sums, x_scale_T, scale_desc, first_row + NUM_OUT, group, CARRIED,
                    BY_GROUP, ROWS_FIRST,
                )  # fmt: skip
            total = _added(
                total, sums, x_scale_T, scale_desc, first_row, group, CARRIED, BY_GROUP, ROWS_FIRST
            )  # fmt: skip
            # Those of the next step: loads so narrow are not in the pipeline.
            x_scale_T = _x_scales(
                x_scale_ptr, in_row_T, is_row_T, num_in_rows, tl.minimum(step + 1, STEPS - 1),
                BY_GROUP,
            )  # fmt: skip
        if CARRIED:
            total = sums.to(tl.float32)
            up_total = up_sums.to(tl.float32)
        if not BY_GROUP:
            x_scale_T = tl.load(x_scale_ptr + in_row_T, mask=is_row_T, other=0.0)
        o = first_o + tl.arange(0, BLOCK_O)
        row_O = first_expert_row + tl.minimum(o, NUM_OUT - 1)
        OF_ROWS: tl.constexpr = G == 1
        total = _scaled(
            total, x_scale_T, scale_ptr, bias_ptr, row_O, SCALE_O, OF_ROWS, BY_GROUP, ROWS_FIRST
        )
        if GATING is not None:
            up_total = _scaled(
                up_total, x_scale_T, scale_ptr, bias_ptr, row_O + NUM_OUT, SCALE_O, OF_ROWS,
                BY_GROUP, ROWS_FIRST,
            )  # fmt: skip
            NUMBERS: tl.constexpr = tl.float32 if EMITS else out_ptr.dtype.element_ty
            total = gated_rounded(total, up_total, GATING, NUMBERS)
        if not ROWS_FIRST:
            total = tl.trans(total)
        pointers = out_ptr + out_row_T.to(tl.int64)[:, None] * NUM_OUT + o[None, :]
        inside = is_row_T[:, None] & (o < NUM_OUT)[None, :]
        if EMITS:
            scale_T, inverse_T = group_scales(total, 448.0)
            scale_ptrs = out_scale_ptr + tl.program_id(0) * (num_in_rows * K) + out_row_T
            tl.store(scale_ptrs, scale_T, mask=is_row_T)
            tl.store(pointers, encode(total * inverse_T[:, None], "fp8"), mask=inside)
        else:
            tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=inside)


def quantized_gate_up(
    rows: QuantizedRows,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RF: Tensor | QuantizedRows,
    gating: Gating,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """As `expert_gate_up`, of rows of tokens in the weight's `expert_row_form`.

    `out_RF` may be codes with scales by groups, where a program has whole groups (`emits_codes`):
    of sums that are not rounded before.
    """
    num_pairs, num_tokens = order.num_pairs, rows.shape[0]
    assert num_pairs % num_tokens == 0 and out_RF.shape == (num_pairs, stack.num_out // 2)
    _launch(rows, stack, order, out_RF, config, pdl, num_pairs // num_tokens, gating)


def quantized_down(
    rows: QuantizedRows,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RE: Tensor,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """As `expert_down`, of rows in the order of experts."""
    assert rows.shape[0] == order.num_pairs and out_RE.shape == (order.num_pairs, stack.num_out)
    _launch(rows, stack, order, out_RE, config, pdl)


def _launch(
    rows: QuantizedRows,
    stack: ExpertStack,
    order: ExpertOrder,
    out: Tensor | QuantizedRows,
    config: ExpertConfig,
    pdl: bool,
    top_k: int = 0,
    gating: Gating | None = None,
) -> None:
    weight, num_out, num_in = stack.weight, out.shape[1], stack.num_in
    assert isinstance(weight, Packed) and rows.form == expert_row_form(weight)
    assert order.order_R is not None and rows.shape[1] == num_in
    assert config.block_rows == order.block_rows and order.num_experts == stack.num_experts
    num_groups, scales = weight.scales_OG.shape[1], weight.scales_OG
    assert num_in % config.block_in == 0 and (num_groups == 1 or config.block_in == 128)
    x_RE = rows.codes_TPI[:, 0]
    if isinstance(out, QuantizedRows):
        assert emits_codes(out.form, config.block_rows) and config.block_out == SCALE_GROUP
        assert gating is not None
        out_values, out_scales, _ = RowPointers.of(out)
    else:
        assert out.is_contiguous()
        out_values, out_scales = out, None
    num_tiles = order.tiles_3N.shape[1]
    x_block = [config.block_rows, config.block_in]
    _quantized_expert_kernel[(triton.cdiv(num_out, config.block_out), num_tiles)](
        None if top_k else TensorDescriptor.from_tensor(x_RE, x_block),
        x_RE,
        rows.scales_TG,
        TensorDescriptor.from_tensor(weight.codes_OB, [config.block_out, config.block_in]),
        None
        if num_groups == 1
        else TensorDescriptor.from_tensor(scales.t(), [1, config.block_out]),
        scales,
        stack.bias_XO,
        out_values,
        out_scales,
        order.order_R,
        order.tiles_3N,
        rows.shape[0],
        num_tiles,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        K=top_k,
        G=num_groups,
        SCALE_O=scales.stride(0),
        IS_FLOAT=rows.form.kind == "fp8",
        BY_GROUP=rows.form.by_group,
        GATING=gating,
        BLOCK_T=config.block_rows,
        BLOCK_O=config.block_out,
        BLOCK_I=config.block_in,
        STAGES=config.num_stages,
        WIDEN=not x_RE.is_cuda,  # the interpreter multiplies codes by their numbers
        num_warps=config.num_warps,
        **dependent_launch(pdl, x_RE),
    )
