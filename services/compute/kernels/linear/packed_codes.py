"""The codes of packed weights, decoded in registers: quantization/packed.py has their meaning,
quantization/halfwords.py an order of them.

Shape legend: O outputs, H halfwords, I inputs: four of a halfword.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.compute.quantization.halfwords import (
    CODE,
    FOURTH,
    FOURTH_FACTOR,
    FOURTH_SHIFT,
    SHIFTS,
)
from services.compute.quantization.packed import Packed

# Two bytes as bfloat16 in a register, as which threads hold them for tensor cores: of four the
# bytes would be taken apart and put together again. Byte k goes to the upper half of lane k, and
# from there its sign to the sign and the rest behind the exponent's first bits: a number 2^120
# times smaller.
_FP8_TO_BF16 = tl.constexpr("""
{
.reg .b32 a, s, zero, much;
mov.b32 zero, 0;
mov.b32 much, 0x7b807b80;
cvt.u32.u16 a, $1;
prmt.b32 a, a, zero, 0x1404;
and.b32 s, a, 0x80008000;
shr.b32 a, a, 4;
lop3.b32 a, a, 0x07f007f0, s, 0xea;
fma.rn.bf16x2 $0, a, much, zero;
}
""")
_CODE = CODE * 0x10001  # of two halfwords

# Two halfwords as four times two bfloat16, 2^126 times smaller, times their scales. Of shifts and
# masks the GPUs meant here make half as many in a cycle as of products.
_FP4_TO_BF16 = tl.constexpr(f"""
{{
.reg .b32 a, b, c, d, zero;
mov.b32 zero, 0;
and.b32 a, $4, {_CODE};
mul.lo.u32 b, $4, {1 << SHIFTS[1]};
mul.lo.u32 c, $4, {1 << SHIFTS[2]};
shr.u32 d, $4, {FOURTH_SHIFT};
and.b32 b, b, {_CODE};
and.b32 c, c, {_CODE};
and.b32 d, d, {FOURTH * 0x10001};
mul.lo.u32 d, d, {FOURTH_FACTOR};
and.b32 d, d, {_CODE};
fma.rn.bf16x2 $0, a, $5, zero;
fma.rn.bf16x2 $1, b, $5, zero;
fma.rn.bf16x2 $2, c, $5, zero;
fma.rn.bf16x2 $3, d, $5, zero;
}}
""")
# Or-ed into 128 an integer's code is the last bits of a bfloat16; less 136 it is its number.
_INT4_TO_BF16 = tl.constexpr("""
{
.reg .b32 a, b, c, d, one, less;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
shr.u32 b, $4, 4;
shr.u32 c, $4, 8;
shr.u32 d, $4, 12;
lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
fma.rn.bf16x2 $2, c, one, less;
fma.rn.bf16x2 $3, d, one, less;
}
""")

FP4_EXPONENT = tl.constexpr(63)
"""Numbers that `scaled_fp4` makes are 2^63 times smaller than they should be."""

_SECOND, _THIRD = tl.constexpr(SHIFTS[1]), tl.constexpr(SHIFTS[2])
_FOURTH_SHIFT, _FOURTH = tl.constexpr(FOURTH_SHIFT), tl.constexpr(FOURTH)
_FOURTH_FACTOR = tl.constexpr(FOURTH_FACTOR)

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
def e2m1(code):
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
        value = e2m1(code).to(tl.float32) * 0.5
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


@triton.jit
def fp8_to_bf16(codes):
    """As `decode` on a GPU, in half as many instructions or fewer."""
    return tl.inline_asm_elementwise(
        _FP8_TO_BF16, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _in_order(a_OH, b_OH, c_OH, d_OH):
    """The four numbers of each halfword in the order of inputs: it moves none to another thread."""
    O: tl.constexpr = a_OH.shape[0]  # noqa: E741
    N: tl.constexpr = a_OH.shape[1] // 8
    a_c = tl.join(tl.reshape(a_OH, (O, N, 8)), tl.reshape(c_OH, (O, N, 8)))
    b_d = tl.join(tl.reshape(b_OH, (O, N, 8)), tl.reshape(d_OH, (O, N, 8)))
    return tl.reshape(tl.permute(tl.join(a_c, b_d), (0, 1, 3, 4, 2)), (O, N * 32))


@triton.jit
def scaled_fp4(codes_OH, scale_OH):
    """The numbers [O, I] of FP4 in bfloat16 times their scales, of which each is 2^63 times larger
    than it should be, 2^63 times smaller: by one product."""
    a, b, c, d = tl.inline_asm_elementwise(
        _FP4_TO_BF16, "=r,=r,=r,=r,r,r", [codes_OH, scale_OH],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return _in_order(a, b, c, d)


@triton.jit
def integers(codes_OH):
    """The numbers [O, I] of INT4 in bfloat16."""
    a, b, c, d = tl.inline_asm_elementwise(
        _INT4_TO_BF16, "=r,=r,=r,=r,r", [codes_OH],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return _in_order(a, b, c, d)


@triton.jit
def _code(bits):
    """Of FP4, from where bfloat16 has it."""
    return ((bits >> 12) & 8) | ((bits >> 6) & 7)


@triton.jit
def decode_halfwords(codes_OH, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers [O, I], on any device."""
    bits = codes_OH.to(tl.int32)
    if KIND == "int4":
        a = bits & 15
        b = (bits >> 4) & 15
        c = (bits >> 8) & 15
        d = (bits >> 12) & 15
    else:
        a = _code(bits)
        b = _code(bits << _SECOND)
        c = _code(bits << _THIRD)
        d = _code(((bits >> _FOURTH_SHIFT) & _FOURTH) * _FOURTH_FACTOR)
    return _in_order(
        _half(a, KIND, DTYPE),
        _half(b, KIND, DTYPE),
        _half(c, KIND, DTYPE),
        _half(d, KIND, DTYPE),
    )


@triton.jit
def complete(sums):
    """Sums of products with decoded weights once they are there, by no instruction.

    Tensor cores read such weights out of registers while the program goes on. If nothing else in a
    loop asks for the sums, Triton does not wait for them at a step's end, and the next step's
    weights are decoded into registers that are still being read: now and then, sums were wrong.
    """
    KIND: tl.constexpr = "=r,0" if sums.dtype == tl.int32 else "=f,0"
    return tl.inline_asm_elementwise("", KIND, [sums], sums.dtype, is_pure=True, pack=1)
