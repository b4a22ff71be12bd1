"""The codes of packed weights, decoded in registers; quantization/packed.py has their meaning."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
# The same of E2M1 in lower and upper halves, 2^126 times smaller, times their scales. A product
# with two powers of two puts a copy of the code where its sign belongs, and one where the rest
# does: on the GPUs meant here half as many bits are shifted and masked in a cycle as multiplied.
_FP4_TO_BF16 = tl.constexpr("""
{
.reg .b32 a, u, v, zero;
mov.b32 zero, 0;
cvt.u32.u16 a, $2;
prmt.b32 a, a, zero, 0x4140;
and.b32 u, a, 0x000f000f;
and.b32 v, a, 0x00f000f0;
mul.lo.u32 u, u, 0x1040;
mul.lo.u32 v, v, 0x0104;
and.b32 u, u, 0x81c081c0;
and.b32 v, v, 0x81c081c0;
fma.rn.bf16x2 $0, u, $3, zero;
fma.rn.bf16x2 $1, v, $3, zero;
}
""")
# Or-ed into 128 a code of 4 bits is the last bits of a bfloat16; less 136 it is its number.
_INT4_TO_BF16 = tl.constexpr("""
{
.reg .b32 a, b, one, less;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xc308c308;
cvt.u32.u16 a, $2;
prmt.b32 a, a, 0, 0x4140;
shr.b32 b, a, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
}
""")

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
def decode_bf16(codes, KIND: tl.constexpr):
    """As `decode` on a GPU, to bfloat16, in half as many instructions or fewer: of codes of FP8 and
    of INT4."""
    if KIND == "int4":
        low, high = tl.inline_asm_elementwise(
            _INT4_TO_BF16, "=r,=r,h", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        low = tl.inline_asm_elementwise(
            _FP8_TO_BF16, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        high = low
    return low, high


FP4_EXPONENT = tl.constexpr(63)
"""Numbers that `decode_scaled_fp4` makes are 2^63 times smaller than they should be."""


@triton.jit
def decode_scaled_fp4(codes, scale):
    """Numbers of FP4 in lower and upper halves, times their scales in bfloat16, 2^63 times smaller:
    in one product. The scale is 2^63 times larger, and has the codes' shape."""
    return tl.inline_asm_elementwise(
        _FP4_TO_BF16, "=r,=r,h,r", [codes, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def complete(sums):
    """Sums of products with decoded weights once they are there, by no instruction.

    Tensor cores read such weights out of registers while the program goes on. If nothing else in a
    loop asks for the sums, Triton does not wait for them at a step's end, and the next step's
    weights are decoded into registers that are still being read: now and then, sums were wrong.
    """
    KIND: tl.constexpr = "=r,0" if sums.dtype == tl.int32 else "=f,0"
    return tl.inline_asm_elementwise("", KIND, [sums], sums.dtype, is_pure=True, pack=1)
