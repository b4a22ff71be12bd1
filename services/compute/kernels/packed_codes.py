"""The codes of packed weights, decoded in registers; quantization/packed.py has what they mean."""

from __future__ import annotations

import triton
import triton.language as tl


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
            codes = codes.to(tl.float8e4nv, bitcast=True)
        low = codes.to(DTYPE)
        high = low
    return low, high
