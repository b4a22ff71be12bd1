"""The product of one quantized row with a weight of integers, at the memory's speed.

Four codes at a time are multiplied by four of the row's and added up, exactly (dp4a). The row has
16 bits, so that there are two such products for each: an instruction for each code of 4 bits, where
converting both to float32 takes five. What bounds it are instructions: a thread has whole quads
of words, adds their products up as integers, and meets the other threads once, at the end. Gate/up
of an 8B model took 24.0 us where a unit's threads met at each scale, and takes 17.1 (H200).

Shape legend: O outputs, R rows of a program, W words of four codes (of 4 bits: eight), Q quads of
words, which one thread has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.matvec_config import NUM_SMS
from services.compute.kernels.linear.quantized_matmul_config import row_form
from services.compute.kernels.rows.quantized_rows import SCALE_GROUP, QuantizedRows
from services.compute.quantization.packed import Packed

_SCALE_GROUP = tl.constexpr(SCALE_GROUP)


@dataclass(frozen=True, slots=True)
class IntegerRowConfig:
    """Constants of one launch; powers of two, but for `num_stages`."""

    rows: int
    words: int  # of a row at once
    num_warps: int
    num_stages: int = 1


LARGE_WEIGHT = 64 << 20
"""Codes from which on there are so many programs that each has half of the threads."""


def integer_row_config(weight: Packed) -> IntegerRowConfig:
    """By a sweep on an H200 (benchmarks/results/gpu_packed.md)."""
    num_out, num_words = len(weight.codes_OB), weight.codes_OB.shape[1] // 4
    if not weight.has_halves:
        return IntegerRowConfig(2, 256, 1)
    if 1024 < num_words <= 2048 and num_words % 512:
        return IntegerRowConfig(4, 2048, 8)
    words = min(512, 1 << (num_words.bit_length() - 1))
    rows = 8 if num_out >= 8 * 4 * NUM_SMS else 4
    num_codes = num_out * weight.num_inputs
    is_large = num_codes >= LARGE_WEIGHT
    if is_large and num_codes < 2 * LARGE_WEIGHT and num_words % 1024 == 0:
        return IntegerRowConfig(4, 1024, 4)  # alone, qkv of 70B 13.0 µs for 15.4, o 11.7 for 13.8
    return IntegerRowConfig(rows, words, 2 if is_large or words < 512 else 4)


# 256 times a row's upper plane and its lower one, times four words of codes: of 8 bits, and of 4
# as 16 times their numbers, lower halves ($5 to $8, $13 to $16) and upper ones.
_DOT_8 = tl.constexpr(
    "{ .reg .s32 sum; dp4a.s32.s32 sum, $1, $5, 0;"
    + "".join(f"dp4a.s32.s32 sum, ${c}, ${c + 4}, sum;" for c in (2, 3, 4))
    + "shl.b32 sum, sum, 8;"
    + "".join(f"dp4a.s32.s32 sum, ${c}, ${c + 8}, sum;" for c in (1, 2, 3, 4))
    + "mov.b32 $0, sum; }"
)
_DOT_4 = tl.constexpr(
    "{ .reg .s32 sum; .reg .b32 low<5>, high<5>; mov.b32 sum, 0;"
    + "".join(
        f"shl.b32 low{c}, ${c}, 4; lop3.b32 low{c}, low{c}, 0xf0f0f0f0, 0x80808080, 0x6a;"
        f"lop3.b32 high{c}, ${c}, 0xf0f0f0f0, 0x80808080, 0x6a;"
        f"dp4a.s32.s32 sum, low{c}, ${c + 4}, sum; dp4a.s32.s32 sum, high{c}, ${c + 8}, sum;"
        for c in (1, 2, 3, 4)
    )
    + "shl.b32 sum, sum, 8;"
    + "".join(
        f"dp4a.s32.s32 sum, low{c}, ${c + 12}, sum; dp4a.s32.s32 sum, high{c}, ${c + 16}, sum;"
        for c in (1, 2, 3, 4)
    )
    + "mov.b32 $0, sum; }"
)


@triton.jit
def _dp4a(codes, x):
    """What the instruction does, for the interpreter."""
    sums = tl.zeros_like(codes + x)
    for shift in tl.static_range(0, 32, 8):
        sums += ((codes << (24 - shift)) >> 24) * ((x << (24 - shift)) >> 24)
    return sums


@triton.jit
def _quads(words, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """Words [R, 4 Q] as four tensors [R, Q]; a thread has all four of a quad."""
    even, odd = tl.split(tl.reshape(words, (ROWS, QUADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_quads(x_ptr, word_W, w_in, MASKED: tl.constexpr, QUADS: tl.constexpr):
    """Words of the row, [1, Q] each."""
    if MASKED:
        words = tl.load(x_ptr + word_W, mask=w_in, other=0)
    else:
        words = tl.load(x_ptr + word_W)
    return _quads(words[None, :], 1, QUADS)


@triton.jit
def _bytes_of_4(codes):
    """Codes of 4 bits, less 8 and times 16: lower halves, upper halves."""
    return ((codes << 4) & -0x0F0F0F10) ^ -0x7F7F7F80, (codes & -0x0F0F0F10) ^ -0x7F7F7F80


@triton.jit
def _dot(
    codes, x_ptr, w, w_in, PLANE: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Each quad of codes [R, 4 Q] times the row's, exactly; those of 4 bits 16 times."""
    c0, c1, c2, c3 = _quads(codes, ROWS, QUADS)
    if HALVES:
        w = w // 16 * 32 + w % 16  # of the lower halves' inputs; the upper halves' are 64 behind
    u0, u1, u2, u3 = _load_quads(x_ptr, w, w_in, MASKED, QUADS)
    l0, l1, l2, l3 = _load_quads(x_ptr + PLANE, w, w_in, MASKED, QUADS)
    if HALVES:
        v0, v1, v2, v3 = _load_quads(x_ptr + 16, w, w_in, MASKED, QUADS)
        m0, m1, m2, m3 = _load_quads(x_ptr + PLANE + 16, w, w_in, MASKED, QUADS)
        if ASM:
            sums = tl.inline_asm_elementwise(
                _DOT_4, "=r" + ",r" * 20,
                [c0, c1, c2, c3, u0, u1, u2, u3, v0, v1, v2, v3, l0, l1, l2, l3, m0, m1, m2, m3],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a0, b0 = _bytes_of_4(c0)
            a1, b1 = _bytes_of_4(c1)
            a2, b2 = _bytes_of_4(c2)
            a3, b3 = _bytes_of_4(c3)
            sums = _dp4a(a0, u0) + _dp4a(a1, u1) + _dp4a(a2, u2) + _dp4a(a3, u3)
            sums += _dp4a(b0, v0) + _dp4a(b1, v1) + _dp4a(b2, v2) + _dp4a(b3, v3)
            sums = sums * 256 + _dp4a(a0, l0) + _dp4a(a1, l1) + _dp4a(a2, l2) + _dp4a(a3, l3)
            sums += _dp4a(b0, m0) + _dp4a(b1, m1) + _dp4a(b2, m2) + _dp4a(b3, m3)
    elif ASM:
        sums = tl.inline_asm_elementwise(
            _DOT_8, "=r" + ",r" * 12, [c0, c1, c2, c3, u0, u1, u2, u3, l0, l1, l2, l3],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = _dp4a(c0, u0) + _dp4a(c1, u1) + _dp4a(c2, u2) + _dp4a(c3, u3)
        sums = sums * 256 + _dp4a(c0, l0) + _dp4a(c1, l1) + _dp4a(c2, l2) + _dp4a(c3, l3)
    return sums


@triton.jit
def _load_codes(code_ptr, word_R, w, w_in, MASKED: tl.constexpr):
    pointers = code_ptr + word_R[:, None] + w[None, :]
    if MASKED:
        codes = tl.load(pointers, mask=w_in[None, :], other=0)
    else:
        codes = tl.load(pointers, eviction_policy="evict_first")
    return codes


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
    SUM_INPUTS: tl.constexpr,
    BY_GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_WORDS: tl.constexpr = NUM_IN // (8 if HALVES else 4)
    QUAD_INPUTS: tl.constexpr = 32 if HALVES else 16
    QUADS: tl.constexpr = WORDS // 4
    MASKED: tl.constexpr = NUM_WORDS % WORDS != 0
    UNIT: tl.constexpr = 1.0 / 16 if HALVES else 1.0
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_R = tl.minimum(o, NUM_OUT - 1)
    word_R = row_R.to(tl.int64) * NUM_WORDS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Sums stay apart by quad until the end: threads meet once.
    y_RQ = tl.zeros((ROWS, QUADS), dtype=tl.float32)
    for first in tl.range(0, NUM_WORDS, WORDS, num_stages=STAGES):
        w = first + tl.arange(0, WORDS)
        codes = _load_codes(code_ptr, word_R, w, w < NUM_WORDS, MASKED)
        sums_RQ = _dot(
            codes, x_ptr, w, w < NUM_WORDS, NUM_IN // 4, HALVES, MASKED, ROWS, QUADS, ASM
        ).to(tl.float32)
        q = first // 4 + tl.arange(0, QUADS)
        if G > 1:
            q_in = q * QUAD_INPUTS < NUM_IN
            group = tl.minimum(q * QUAD_INPUTS // (NUM_IN // G), G - 1)
            place_RQ = row_R[:, None] * SCALE_O + group[None, :] * SCALE_G
            if HAS_ZEROS:
                begins = q_in & (q * QUAD_INPUTS % SUM_INPUTS == 0)
                x_sum_Q = tl.load(x_sum_ptr + q * QUAD_INPUTS // SUM_INPUTS, mask=begins, other=0.0)
                zero_RQ = tl.load(zero_ptr + place_RQ).to(tl.float32)
                sums_RQ -= zero_RQ * (x_sum_Q / UNIT)[None, :]
            sums_RQ *= tl.load(scale_ptr + place_RQ).to(tl.float32)
        if BY_GROUP:
            x_group = tl.minimum(q * QUAD_INPUTS, NUM_IN - 1) // _SCALE_GROUP
            sums_RQ *= tl.load(x_scale_ptr + x_group)[None, :]
        y_RQ += sums_RQ
    y_R = tl.sum(y_RQ, axis=1) * UNIT
    if G == 1:
        if HAS_ZEROS:
            zero_R = tl.load(zero_ptr + row_R * SCALE_O).to(tl.float32)
            y_R -= zero_R * tl.load(x_sum_ptr)
        y_R *= tl.load(scale_ptr + row_R * SCALE_O).to(tl.float32)
    if not BY_GROUP:
        y_R *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        y_R += tl.load(bias_ptr + row_R).to(tl.float32)
    tl.store(out_ptr + o, y_R.to(out_ptr.dtype.element_ty), mask=o < NUM_OUT)


def integer_matvec(
    row: QuantizedRows,
    weight: Packed,
    bias_O: Tensor | None,
    out_1O: Tensor,
    config: IntegerRowConfig,
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
        SUM_INPUTS=row.form.sum_inputs or num_in,
        BY_GROUP=row.form.by_group,
        HALVES=weight.has_halves,
        HAS_ZEROS=weight.zeros_OG is not None,
        HAS_BIAS=bias_O is not None,
        ROWS=config.rows,
        WORDS=config.words,
        STAGES=config.num_stages,
        ASM=out_1O.is_cuda,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_1O),
    )
