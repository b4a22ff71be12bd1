"""The codes of packed weights, decoded in registers; quantization/packed.py has their meaning."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.compute.quantization.packed import Packed

FP8_SINCE = (8, 9)
"""The compute capability of the first GPUs that convert FP8."""


def kernel_kind(weight: Packed) -> str:
    """KIND of a kernel for this weight on its device."""
    codes = weight.codes_OB
    if weight.kind != "fp8" or not codes.is_cuda:
        return weight.kind
    has_fp8 = torch.cuda.get_device_capability(codes.device) >= FP8_SINCE
    return "fp8" if has_fp8 else "fp8 by bits"


@triton.jit
def inputs_of(b, HALVES: tl.constexpr):
    """The inputs of bytes; with two codes in a byte those of the lower halves, and the upper
    halves' are 16 behind."""
    i = b
    if HALVES:
        i = (b // 16) * 32 + b % 16
    return i


@triton.jit
def _e2m1(code):
    """Twice the number that a code of 4 bits is: an integer of -12 to 12."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    twice = tl.where(exponent == 0, mantissa, (2 | mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where((code & 8) != 0, -twice, twice)


@triton.jit
def _half(code, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of codes of 4 bits (int32)."""
    if KIND == "int4":
        # Or-ed into 2^23 a code is the last bits of a float32: no conversion, of which a
        # multiprocessor makes 16 a cycle.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        value = _e2m1(code).to(tl.float32) * 0.5
    return value.to(DTYPE)


@triton.jit
def decode(codes, HALVES: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of codes; of bytes with two, those of the lower halves and of the upper ones."""
    if HALVES:
        wide = codes.to(tl.int32)
        low = _half(wide & 15, KIND, DTYPE)
        high = _half(wide >> 4, KIND, DTYPE)
    else:
        if KIND == "fp8":
            low = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        elif KIND == "fp8 by bits":
            bits = codes.to(tl.int32)
            bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # of a float16, 256 times smaller
            low = (bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0).to(DTYPE)
        else:
            low = codes.to(DTYPE)
        high = low
    return low, high
