"""Weights of 4 bits as hopper_int4 multiplies them: decoded in the registers that tensor cores
read, less the zeros of their groups.

Shape legend: M outputs of a warpgroup, B bytes of codes, G groups of inputs, O outputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from services.compute.kernels.linear.hopper_int4_config import STEP_IN

STEP_K = gl.constexpr(STEP_IN)
SMALLEST_SCALE = gl.constexpr(2.0**-40)

# Two bytes of codes as four numbers. In bfloat16 a lower half is or-ed into 128; an upper half is
# what it is as a bfloat16: its code times 2^-129, exactly. Both become a quarter of the number.
_BF16 = gl.constexpr("""
{
.reg .b32 a, low, high, quarter, much;
mov.b32 quarter, 0x3e803e80;
mov.b32 much, 0x7f007f00;
cvt.u32.u16 a, $2;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 low, a, 0x000f000f, 0x43004300, 0xea;
and.b32 high, a, 0x00f000f0;
fma.rn.bf16x2 $0, low, quarter, $3;
fma.rn.bf16x2 $1, high, much, $4;
}
""")
# In float16 halves are or-ed into 1,024.
_F16 = gl.constexpr("""
{
.reg .b32 a, low, high, sixteenth;
mov.b32 sixteenth, 0x2c002c00;
cvt.u32.u16 a, $2;
prmt.b32 a, a, 0, 0x4140;
lop3.b32 low, a, 0x000f000f, 0x64006400, 0xea;
lop3.b32 high, a, 0x00f000f0, 0x64006400, 0xea;
add.rn.f16x2 $0, low, $3;
fma.rn.f16x2 $1, high, sixteenth, $4;
}
""")


@gluon.jit
def _less_zero(zero, DTYPE: gl.constexpr):
    """What is added to lower halves and to upper ones, for their numbers less `zero`."""
    if DTYPE == gl.bfloat16:
        low = (-34.0 - 0.25 * zero).to(DTYPE)
        high = (-2.0 - 0.25 * zero).to(DTYPE)
    else:
        low = (-1032.0 - zero).to(DTYPE)
        high = (-72.0 - zero).to(DTYPE)
    return low, high


@gluon.jit
def decoded(codes_MB, zero_M, DTYPE: gl.constexpr, operand: gl.constexpr):
    """Numbers [M, 2 B] less zeros, in the order of inputs; of bfloat16 a quarter of them."""
    low_M, high_M = _less_zero(zero_M, DTYPE)
    M: gl.constexpr = codes_MB.shape[0]
    B: gl.constexpr = codes_MB.shape[1]
    low_MB, _ = gl.broadcast(low_M[:, None], codes_MB)
    high_MB, _ = gl.broadcast(high_M[:, None], codes_MB)
    if low_M.dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            _BF16, "=r,=r,h,r,r", [codes_MB, low_MB, high_MB], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            _F16, "=r,=r,h,r,r", [codes_MB, low_MB, high_MB], dtype=(gl.float16, gl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    joined = gl.join(low.reshape([M, B // 16, 16]), high.reshape([M, B // 16, 16]))
    numbers = joined.permute(0, 1, 3, 2).reshape([M, 2 * B])
    return gl.convert_layout(numbers, operand, assert_trivial=True)


@gluon.jit
def of_rows(pointer, group, row_M, num_out):
    """A group's scales or zeros [G, O] as 32 bits each, which `value_of` waits for: the
    assembler packs those of 16 where the turn of a loop that loads them ends."""
    WIDE: gl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 32
    LOAD: gl.constexpr = "ld.global.nc.b32 $0, [$1];" if WIDE else "ld.global.nc.u16 $0, [$1];"
    addresses = (pointer + group * num_out + row_M).to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(
        LOAD, "=r,l", [addresses], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def value_of(bits, pointer):
    """What `of_rows` has loaded."""
    dtype: gl.constexpr = pointer.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        bits = bits.to(gl.int16)
    return bits.to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def group_of(weight, step, rows, sizes: gl.constexpr, OFFSET: gl.constexpr = 0):
    """The bits of scales and zeros of the group of a step's inputs from OFFSET on, or of the last
    group."""
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    scales, zeros, num_out, steps = weight
    row_M, code_row_M = rows
    layout: gl.constexpr = row_M.type.layout
    code_layout: gl.constexpr = code_row_M.type.layout
    scale_M = gl.zeros([M], gl.int32, layout=layout)
    zero_M = gl.zeros([M], gl.int32, layout=code_layout)
    group = 0
    if GROUP > 0:
        group = gl.minimum((step * STEP_K + OFFSET) // GROUP, steps * STEP_K // GROUP - 1)
        scale_M = of_rows(scales, group, row_M, num_out)
    if ZEROS:
        zero_M = of_rows(zeros, group, code_row_M, num_out)
    return scale_M, zero_M


@gluon.jit
def divisor(bits, scales, GROUP: gl.constexpr):
    """A scale, and none so small that nothing can be divided by it."""
    scale_M = value_of(bits, scales)
    if GROUP == 0:
        layout: gl.constexpr = scale_M.type.layout
        scale_M = gl.full(scale_M.shape, 1.0, gl.float32, layout=layout)
    return gl.where(gl.abs(scale_M) < SMALLEST_SCALE, SMALLEST_SCALE, scale_M)


@gluon.jit
def prefetch_group(weight, step, output, sizes: gl.constexpr):
    """Ask the L2 cache for scales and zeros of a step's group, one warp's way."""
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    scales, zeros, num_out, steps = weight
    LINE: gl.constexpr = 64  # scales of a line
    GROUPS: gl.constexpr = max(1, STEP_K // GROUP)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=layout)
    row = gl.minimum(output + lane % 4 * LINE, num_out - 1)
    group = step * STEP_K // GROUP + lane // 4 % GROUPS
    _prefetch(scales + group * num_out + row)
    if ZEROS:
        _prefetch(zeros + group * num_out + row)


@gluon.jit
def _prefetch(pointers):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
        [pointers.to(gl.int64, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
