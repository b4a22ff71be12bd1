"""Entries of a quantized KV cache in kernels: made and read by their bits; see kv_format.

So they are the same on GPUs that have no FP8, and in Triton's interpreter, which has none either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.kv.kv_format import (
    FP8,
    LARGEST,
    SMALLEST_SCALE,
    LayerPages,
)
from services.compute.kernels.step.step_buffers import page_stride

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_QUERY_UNIT = tl.constexpr(64.0)
INFINITY = tl.constexpr(0x7F800000)  # bits of a float32
_NO_NUMBER = tl.constexpr(0x7FC0)  # of a bfloat16
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)  # of FP8
_SUBNORMALS = tl.constexpr(2.0**14)  # float32s from here on are as far apart as FP8's subnormals
_SUBNORMALS_BITS = tl.constexpr(0x46800000)
WHOLE = tl.constexpr(1.5 * 2.0**23)  # float32s around this are the integers
WHOLE_BITS = tl.constexpr(0x4B400000)

# Four entries in a register become two registers of pairs of float16.
_FP8_PAIRS = tl.constexpr("""
{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
# Of two words in a register the lower entries go to one pair, the upper ones to the other.
_FP8_WORDS = tl.constexpr("""
{
.reg .b32 apart;
.reg .b16 low, high;
prmt.b32 apart, $2, 0, 0x3120;
mov.b32 {low, high}, apart;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}
""")


def _int8_halves(first: int, second: int) -> str:
    """Entries as float16, which bytes go where by these selectors.

    With the sign bit turned an integer is x + 128; as the last byte of a float16 from 1024 on it is
    x + 1152.
    """
    return f"""
{{
.reg .b32 x, y, less;
xor.b32 x, $2, 0x80808080;
mov.b32 less, 0xe480e480;
prmt.b32 y, x, 0x64646464, {first:#06x};
add.f16x2 $0, y, less;
prmt.b32 y, x, 0x64646464, {second:#06x};
add.f16x2 $1, y, less;
}}
"""


_INT8_PAIRS = tl.constexpr(_int8_halves(0x4140, 0x4342))
_INT8_WORDS = tl.constexpr(_int8_halves(0x4240, 0x4341))


class Codes(NamedTuple):
    """A layer's pages as kernels take them: entries and scales by their bits."""

    pages: Tensor
    scales: Tensor | None  # int32 [N, K, P], the value's above the key's
    entry: str | None  # "fp8", "int8"; None: pages have the values themselves
    largest: float  # magnitude of an entry
    page_stride: int
    scale_stride: int

    @property
    def has_instructions(self) -> bool:
        """Whether the device converts entries; FP8 from compute capability 8.9 on."""
        if not self.pages.is_cuda:
            return False
        capability = torch.cuda.get_device_capability(self.pages.device)
        return self.entry == "int8" or capability >= (8, 9)

    @property
    def words(self) -> Codes:
        """The same by words of two entries."""
        return self._replace(pages=self.pages.view(torch.int16), page_stride=self.page_stride // 2)

    @staticmethod
    def of(layer: LayerPages) -> Codes:
        pages, scales = layer
        if scales is None:
            return Codes(pages, None, None, 0.0, page_stride(pages), 0)
        is_fp8 = pages.dtype == FP8
        return Codes(
            pages.view(torch.uint8 if is_fp8 else torch.int8),
            scales.permute(0, 2, 3, 1).view(torch.int32)[..., 0],
            "fp8" if is_fp8 else "int8",
            LARGEST[pages.dtype],
            page_stride(pages),
            scales.stride(0) // 2,
        )


@triton.jit
def head_scales(first, second, LARGEST: tl.constexpr):
    """Scales [N] of heads [N, J] of float32 in two halves: bits of a bfloat16."""
    first_bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second_bits = second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # of integers, among which what is no number is the greatest
    bits = tl.max(tl.maximum(first_bits, second_bits), axis=1)
    exact = tl.maximum(bits.to(tl.float32, bitcast=True) * (1.0 / LARGEST), _SMALLEST_SCALE)
    scale = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return tl.where(bits >= INFINITY, _NO_NUMBER, scale)


@triton.jit
def scale_values(bits):
    """Scales as float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(pointers, mask):
    """Scales of keys and of values as float32, by one load; 1 where masked."""
    pair = tl.load(pointers, mask=mask, other=0x3F803F80)
    return scale_values(pair), scale_values(pair >> 16)


@triton.jit
def split_scales(scales):
    """Scales as a number from 1 to 2 times a power of two: the number, the power's logarithm, and
    one over the power. What is no number is so in the first.
    """
    power = scales.to(tl.int32, bitcast=True) & INFINITY
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return scales * inverse, ((power >> 23) - 127).to(tl.float32), inverse


@triton.jit
def half_queries(q_MD, scale_log2, WIDEN: tl.constexpr):
    """Queries as float16, and the scale of their scores.

    Those in bfloat16 are divided by 64: up to 4 million they have a place, and below 2^-8
    they lose bits that would move a score by less than bfloat16's rounding of larger ones does.
    """
    if q_MD.dtype == tl.bfloat16:
        q_MD = (q_MD.to(tl.float32) * (1.0 / _QUERY_UNIT)).to(tl.float16)
        scale_log2 = scale_log2 * _QUERY_UNIT
    if WIDEN:
        q_MD = q_MD.to(tl.float32)
    return q_MD, scale_log2


@triton.jit
def encode(scaled, ENTRY: tl.constexpr):
    """The nearest entry to each of these float32s, by its bits."""
    bits = scaled.to(tl.int32, bitcast=True)
    if ENTRY == "fp8":
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        size = magnitude.to(tl.float32, bitcast=True)
        small = (size + _SUBNORMALS).to(tl.int32, bitcast=True) - _SUBNORMALS_BITS
        code = tl.where(size < _SMALLEST_NORMAL, small, normal)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return ((scaled + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS).to(tl.int8)


@triton.jit
def decode(codes, ENTRY: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Entries as float16, which has all of them, or WIDE, as float32. ASM: by instructions of the
    GPU."""
    if ASM and not WIDE:
        text: tl.constexpr = _FP8_PAIRS if ENTRY == "fp8" else _INT8_PAIRS
        return tl.inline_asm_elementwise(
            text, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4
        )
    return _decode_bits(codes.to(tl.int32), ENTRY, WIDE)


@triton.jit
def decode_words(words, ENTRY: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr):
    """The lower and the upper entries of these words, as `decode` has them."""
    if ASM and not WIDE:
        text: tl.constexpr = _FP8_WORDS if ENTRY == "fp8" else _INT8_WORDS
        return tl.inline_asm_elementwise(
            text, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    bits = words.to(tl.int32)
    return _decode_bits((bits << 24) >> 24, ENTRY, WIDE), _decode_bits(bits >> 8, ENTRY, WIDE)


@triton.jit
def _decode_bits(bits, ENTRY: tl.constexpr, WIDE: tl.constexpr):
    if ENTRY == "fp8":
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # of a float16 that is 256 times smaller
        numbers = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    else:
        numbers = bits.to(tl.float16)
    return numbers.to(tl.float32) if WIDE else numbers
