"""The product of one quantized row with a weight of integers, at the memory's speed.

Four codes at a time are multiplied by four of the row's and added up, exactly (dp4a): an
instruction for each code of 4 bits, where converting both to float32 takes five. The row has 16
bits, so that there are two such products for each.

Shape legend: O outputs, R rows of a program, U units of a step, W words of four codes in a unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch, prefetch_rows
from services.compute.kernels.packed_matvec import PackedRowConfig, unit_inputs
from services.compute.kernels.quantized_matmul_config import row_form
from services.compute.kernels.quantized_rows import QuantizedRows
from services.compute.quantization.packed import Packed

PREFETCH_BYTES = 16 << 10
"""Of a program's weights, before it waits for the kernel before it."""

LINE_BYTES = 128


def integer_row_config(weight: Packed) -> PackedRowConfig:
    """By a sweep on an H200 (benchmarks/results/gpu_packed.md)."""
    if not weight.has_halves:
        return PackedRowConfig(8, 2048, 4)
    return PackedRowConfig(8, 2048, 4 if weight.shape[0] > 4096 else 8)


# 256 times the product with the row's upper plane, and that with its lower one.
_DOT_8 = tl.constexpr("""
{
.reg .s32 sum;
dp4a.s32.s32 sum, $1, $2, 0;
shl.b32 sum, sum, 8;
dp4a.s32.s32 $0, $1, $3, sum;
}
""")
# Of a word with eight codes of 4 bits, as 16 times their numbers: lower halves, then upper ones.
_DOT_4 = tl.constexpr("""
{
.reg .s32 sum;
.reg .b32 low, high;
shl.b32 low, $1, 4;
lop3.b32 low, low, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 high, $1, 0xf0f0f0f0, 0x80808080, 0x6a;
dp4a.s32.s32 sum, low, $2, 0;
dp4a.s32.s32 sum, high, $3, sum;
shl.b32 sum, sum, 8;
dp4a.s32.s32 sum, low, $4, sum;
dp4a.s32.s32 $0, high, $5, sum;
}
""")


@triton.jit
def _dp4a(codes, x):
    """What the instruction does, for the interpreter."""
    sums = tl.zeros_like(codes + x)
    for shift in tl.static_range(0, 32, 8):
        sums += ((codes << (24 - shift)) >> 24) * ((x << (24 - shift)) >> 24)
    return sums


@triton.jit
def _products(
    codes, x_ptr, word_UW, inside_UW, plane_words: tl.constexpr, HALVES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Each word of codes [R, U, W] times the row's, exactly; those of 4 bits 16 times."""
    upper = tl.load(x_ptr + word_UW, mask=inside_UW, other=0)[None, :, :]
    lower = tl.load(x_ptr + plane_words + word_UW, mask=inside_UW, other=0)[None, :, :]
    if HALVES:
        # of the upper halves' inputs, 64 behind
        next_upper = tl.load(x_ptr + word_UW + 16, mask=inside_UW, other=0)[None, :, :]
        next_lower = tl.load(x_ptr + plane_words + word_UW + 16, mask=inside_UW, other=0)
        next_lower = next_lower[None, :, :]
        if ASM:
            sums = tl.inline_asm_elementwise(
                _DOT_4, "=r,r,r,r,r,r", [codes, upper, next_upper, lower, next_lower],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low = ((codes << 4) & -0x0F0F0F10) ^ -0x7F7F7F80
            high = (codes & -0x0F0F0F10) ^ -0x7F7F7F80
            sums = (_dp4a(low, upper) + _dp4a(high, next_upper)) * 256
            sums += _dp4a(low, lower) + _dp4a(high, next_lower)
    elif ASM:
        sums = tl.inline_asm_elementwise(
            _DOT_8, "=r,r,r,r", [codes, upper, lower], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        sums = _dp4a(codes, upper) * 256 + _dp4a(codes, lower)
    return sums


@triton.jit
def _integer_matvec_kernel(
    x_ptr,
    x_scale_ptr,
    x_sum_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_WORDS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    CODES: tl.constexpr = 8 if HALVES else 4  # in a word
    NUM_WORDS: tl.constexpr = NUM_IN // CODES
    NUM_UNITS: tl.constexpr = (NUM_WORDS + UNIT_WORDS - 1) // UNIT_WORDS
    UNIT: tl.constexpr = 1.0 / 16 if HALVES else 1.0
    o_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_in = o_R < NUM_OUT
    row_R = tl.minimum(o_R, NUM_OUT - 1)
    word_R = row_R.to(tl.int64) * NUM_WORDS
    if PDL:
        prefetch_rows(code_ptr, word_R, 0, NUM_WORDS, PREFETCH_LINES)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y_RU = tl.zeros((ROWS, UNITS), dtype=tl.float32)
    for first in tl.range(0, NUM_UNITS, UNITS):
        u_U = first + tl.arange(0, UNITS)
        u_in = u_U < NUM_UNITS
        w_UW = u_U[:, None] * UNIT_WORDS + tl.arange(0, UNIT_WORDS)[None, :]
        inside_UW = w_UW < NUM_WORDS
        pointers = code_ptr + word_R[:, None, None] + w_UW[None, :, :]
        if NUM_WORDS % (UNITS * UNIT_WORDS) == 0:
            codes = tl.load(pointers, eviction_policy="evict_first")
        else:
            codes = tl.load(pointers, mask=inside_UW[None, :, :], other=0)
        word_UW = w_UW
        if HALVES:
            word_UW = w_UW // 16 * 32 + w_UW % 16
        products = _products(codes, x_ptr, word_UW, inside_UW, NUM_IN // 4, HALVES, ASM)
        sums_RU = tl.sum(products, axis=2).to(tl.float32) * UNIT
        group_U = tl.minimum(u_U * UNIT_WORDS // (NUM_WORDS // G), G - 1)
        place_RU = row_R[:, None] * SCALE_O + group_U[None, :] * SCALE_G
        if HAS_ZEROS and G > 1:
            zero_RU = tl.load(zero_ptr + place_RU, mask=u_in[None, :], other=0.0).to(tl.float32)
            x_sum_U = tl.load(x_sum_ptr + u_U, mask=u_in, other=0.0)
            sums_RU -= zero_RU * x_sum_U[None, :]
        if G > 1:
            sums_RU *= tl.load(scale_ptr + place_RU, mask=u_in[None, :], other=0.0).to(tl.float32)
        y_RU += sums_RU
    y_R = tl.sum(y_RU, axis=1)
    if G == 1:
        if HAS_ZEROS:
            zero_R = tl.load(zero_ptr + row_R * SCALE_O).to(tl.float32)
            y_R -= zero_R * tl.load(x_sum_ptr)
        y_R *= tl.load(scale_ptr + row_R * SCALE_O).to(tl.float32)
    y_R *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        y_R += tl.load(bias_ptr + row_R).to(tl.float32)
    tl.store(out_ptr + o_R, y_R.to(out_ptr.dtype.element_ty), mask=o_in)


def integer_matvec(
    row: QuantizedRows,
    weight: Packed,
    bias_O: Tensor | None,
    out_1O: Tensor,
    config: PackedRowConfig,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b of one row of 16 bits; sums are rounded once, to the dtype of `out_1O`.

    The row is in the weight's `row_form`.
    """
    num_out, num_groups = weight.scales_OG.shape
    num_in = weight.num_inputs
    assert row.form == row_form(weight, 1) and row.shape == (1, num_in)
    assert out_1O.shape == (1, num_out)
    unit = unit_inputs(weight)
    lines = min(PREFETCH_BYTES // config.rows, weight.codes_OB.shape[1]) // LINE_BYTES
    _integer_matvec_kernel[(triton.cdiv(num_out, config.rows),)](
        row.codes_TPI.view(torch.int32),
        row.scales_TG,
        row.sums_TN,
        weight.codes_OB.view(torch.int32),
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        row.scales_TG if bias_O is None else bias_O,  # any address will do where none is read
        out_1O,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        G=num_groups,
        SCALE_O=weight.scales_OG.stride(0),
        SCALE_G=weight.scales_OG.stride(1),
        HALVES=weight.has_halves,
        HAS_ZEROS=weight.zeros_OG is not None,
        HAS_BIAS=bias_O is not None,
        ROWS=config.rows,
        UNITS=max(1, config.step_inputs // unit),
        UNIT_WORDS=unit // (8 if weight.has_halves else 4),
        PREFETCH_LINES=1 << max(0, lines.bit_length() - 1),
        ASM=out_1O.is_cuda,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_1O),
    )
