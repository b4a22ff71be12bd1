"""A packed weight decoded into memory, for products of so many rows that it is read often.

Shape legend: T rows, I inputs, O outputs, B bytes of a row of codes, G groups of inputs in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.linear.packed_codes import decode, inputs_of, kernel_kind
from services.compute.quantization.packed import Packed

BLOCK_OUT = 8
BLOCK_BYTES = 256


@triton.jit
def _store_numbers(
    out_ptr, scale_ptr, zero_ptr, w_OI, o, i, inside, NUM_IN: tl.constexpr, G: tl.constexpr,
    SCALE_O: tl.constexpr, SCALE_G: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    place = o[:, None] * SCALE_O + (i // (NUM_IN // G) * SCALE_G)[None, :]
    if HAS_ZEROS:
        w_OI -= tl.load(zero_ptr + place, mask=inside, other=0.0).to(tl.float32)
    w_OI *= tl.load(scale_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + o[:, None].to(tl.int64) * NUM_IN + i[None, :]
    tl.store(out, w_OI.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_kernel(
    code_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if HALVES else NUM_IN
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = (o < NUM_OUT)[:, None] & (b < NUM_BYTES)[None, :]
    codes = tl.load(
        code_ptr + o[:, None].to(tl.int64) * NUM_BYTES + b[None, :], mask=inside, other=0
    )
    i = inputs_of(b, HALVES)
    low, high = decode(codes, HALVES, KIND, tl.float32)
    _store_numbers(
        out_ptr, scale_ptr, zero_ptr, low, o, i, inside, NUM_IN, G, SCALE_O, SCALE_G, HAS_ZEROS
    )
    if HALVES:
        _store_numbers(
            out_ptr, scale_ptr, zero_ptr, high, o, i + 16, inside, NUM_IN, G, SCALE_O, SCALE_G,
            HAS_ZEROS,
        )  # fmt: skip


def unpack(weight: Packed, out_OI: Tensor) -> None:
    """Write the numbers that the codes stand for, rounded once to `out_OI`'s dtype."""
    num_out, num_bytes = weight.codes_OB.shape
    assert out_OI.shape == (num_out, weight.num_inputs) and out_OI.is_contiguous()
    grid = (triton.cdiv(num_out, BLOCK_OUT), triton.cdiv(num_bytes, BLOCK_BYTES))
    _unpack_kernel[grid](
        weight.loadable_OB,
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        out_OI,
        NUM_OUT=num_out,
        NUM_IN=weight.num_inputs,
        G=weight.scales_OG.shape[1],
        SCALE_O=weight.scales_OG.stride(0),
        SCALE_G=weight.scales_OG.stride(1),
        KIND=kernel_kind(weight),
        HALVES=weight.has_halves,
        HAS_ZEROS=weight.zeros_OG is not None,
        BLOCK_O=BLOCK_OUT,
        BLOCK_B=BLOCK_BYTES,
    )
