"""Products of one row with weights of 4 bits on Hopper's tensor cores.

The row has 16 bits in two planes of 8, as for `integer_matvec`, whose vectors take 13 instructions
for a word of eight codes. Here it is eight to ten: tensor cores multiply bytes and add them up,
exactly, and a group's sum becomes a number once. A program has rows of the weight that follow one
another, four at a time; a warp has a part of their inputs and keeps what it needs of the row in
registers; what it loads at once are 256 bytes of two rows, in whole cache lines.

An instruction multiplies 16 rows by 8 columns, and there is one row of two planes. A warp has four
parts of four rows of the weight for its 16, and the same parts of both planes for its columns: what
counts is where both are of one part, and one thread has both planes' sums of it.

Shape legend: O outputs, I inputs; E threads of a program, J words of four bytes of a thread, H rows
of a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.quantized_matmul_config import row_form
from services.compute.kernels.rows.quantized_rows import QuantizedRows
from services.compute.quantization.packed import Packed

PART = gl.constexpr(128)
"""Inputs of a part, which are of one group."""

CHUNK = gl.constexpr(512)
"""Inputs of a warp at once: four parts."""

ROWS = gl.constexpr(4)
"""Of a quad."""

MOST_CHUNKS = 8
"""Of a warp: codes and inputs of each take 16 registers of a thread."""

MOST_WARPS = 8

MIN_INPUTS = MIN_OUTPUTS = 4096
"""Smaller weights have not been measured."""

UNIT = gl.constexpr(1.0 / 16)
"""Codes are multiplied less 8 and times 16, as they come out of their bytes."""


@dataclass(frozen=True, slots=True)
class Int4RowConfig:
    """How many programs walk, and of how many warps."""

    programs_per_sm: int
    num_warps: int
    max_registers: int


def int4_row_config(num_in: int) -> Int4RowConfig:
    """By a sweep on an H200 (benchmarks/results/gpu_packed.md)."""
    chunks = triton.cdiv(num_in, CHUNK.value)
    if chunks <= 8:
        return Int4RowConfig(5, 4, 96)
    if chunks <= 16:
        return Int4RowConfig(3, MOST_WARPS, 80)
    if chunks <= 32:
        return Int4RowConfig(2, MOST_WARPS, 128)
    return Int4RowConfig(1, MOST_WARPS, 255)


def walks_over(weight: Packed) -> bool:
    """Whether this is for it: groups of whole parts, with scales of adjacent rows side by side."""
    num_out, num_in = weight.shape
    scales_OG = weight.scales_OG
    return (
        scales_OG.is_cuda
        and num_out >= MIN_OUTPUTS
        and MIN_INPUTS <= num_in <= MOST_WARPS * MOST_CHUNKS * CHUNK.value
        and torch.cuda.get_device_capability(scales_OG.device) == HOPPER
        and weight.kind == "int4"
        and scales_OG.shape[1] > 1
        and weight.group_size % PART.value == 0
        and num_out % ROWS.value == 0
        and scales_OG.stride() == (1, num_out)
        and (weight.zeros_OG is None or weight.zeros_OG.stride() == (1, num_out))
    )


# All threads of a warp have to take part, which they do: what comes of it, all of them add up.
# Codes of two weight rows ($2 to $5, $6 to $9) times both planes of the inputs of lower halves of
# bytes ($10 to $13) and upper ones: the sums of each row.
_MULTIPLY = gl.constexpr(
    "{ .reg .b32 a<4>; .reg .s32 d<4>;"
    + "".join(f"mov.b32 d{i}, 0;" for i in range(4))
    + "".join(
        f"shl.b32 a0, ${2 + j}, 4; shl.b32 a1, ${6 + j}, 4;"
        "lop3.b32 a0, a0, 0xf0f0f0f0, 0x80808080, 0x6a;"
        "lop3.b32 a1, a1, 0xf0f0f0f0, 0x80808080, 0x6a;"
        f"lop3.b32 a2, ${2 + j}, 0xf0f0f0f0, 0x80808080, 0x6a;"
        f"lop3.b32 a3, ${6 + j}, 0xf0f0f0f0, 0x80808080, 0x6a;"
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
        f" {{d0, d1, d2, d3}}, {{a0, a1, a2, a3}}, {{${10 + j}, ${14 + j}}}, {{d0, d1, d2, d3}};"
        for j in range(4)
    )
    + "mad.lo.s32 $0, d0, 256, d1; mad.lo.s32 $1, d2, 256, d3; }"
)


@gluon.jit
def _split(words_EJ, lanes: gl.constexpr):
    """Four words of each thread."""
    even, odd = gl.split(words_EJ.reshape([words_EJ.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, lanes, assert_trivial=True),
        gl.convert_layout(second, lanes, assert_trivial=True),
        gl.convert_layout(third, lanes, assert_trivial=True),
        gl.convert_layout(fourth, lanes, assert_trivial=True),
    )


@gluon.jit
def _threads(size: gl.constexpr):
    """Threads [E], and the numbers [1, …] of what each has."""
    layout: gl.constexpr = gl.BlockedLayout([1, size], [32, 1], [gl.num_warps(), 1], [1, 0])
    e = gl.arange(0, 32 * gl.num_warps(), layout=gl.SliceLayout(1, layout))
    return e, gl.arange(0, size, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _part(e, first):
    """Of a thread's weights, in a warp's chunk: those from `first` on are one for each warp."""
    return (first + e // 32) * 4 + e // 4 % 4


@gluon.jit
def _load_words(pointers_EJ, part_E, first, NUM_IN: gl.constexpr):
    """Of a chunk for each warp; the last ones may have parts that are not there."""
    if (first + gl.num_warps()) * CHUNK > NUM_IN:
        words = gl.load(pointers_EJ, mask=(part_E < NUM_IN // PART)[:, None], other=0)
    else:
        words = gl.load(pointers_EJ)
    return words


@gluon.jit
def _load_codes(word_ptr, quad, first, second: gl.constexpr, NUM_IN: gl.constexpr):
    """Codes [E, J] of a thread's first or second row."""
    e, j = _threads(4)
    part = _part(e, first)
    row = e // 16 % 2 * 2 + second
    place = row * (NUM_IN // 8) + part * (PART // 8) + e % 4 * 4
    begin = quad.to(gl.int64) * (ROWS * NUM_IN // 8)
    return _load_words(word_ptr + begin + place[:, None] + j, part, first, NUM_IN)


@gluon.jit
def _load_pair(value_ptr, quad, first, sizes: gl.constexpr):
    """Scales or zeros [E, H] of a thread's rows."""
    NUM_OUT, NUM_IN, GROUP = sizes
    e, h = _threads(2)
    group = gl.minimum(_part(e, first), NUM_IN // PART - 1) // (GROUP // PART)
    return gl.load(value_ptr + (group * NUM_OUT + quad * ROWS + e // 16 % 2 * 2)[:, None] + h)


@gluon.jit
def _load_slot(pointers, quad, first: gl.constexpr, sizes: gl.constexpr):
    """What is needed of a quad's chunks: codes, scales, and zeros where there are some."""
    word_ptr, scale_ptr, zero_ptr = pointers
    NUM_IN: gl.constexpr = sizes[1]
    codes = _load_codes(word_ptr, quad, first, 0, NUM_IN)
    more = _load_codes(word_ptr, quad, first, 1, NUM_IN)
    scales = _load_pair(scale_ptr, quad, first, sizes)
    if zero_ptr is None:
        return codes, more, scales
    else:
        return codes, more, scales, _load_pair(zero_ptr, quad, first, sizes)


@gluon.jit
def _load_inputs(x_ptr, first: gl.constexpr, lanes: gl.constexpr, NUM_IN: gl.constexpr):
    """Words of a plane of the row: four inputs of lower halves' codes, then of upper ones'."""
    e, j = _threads(4)
    part = (first + e // 32) * 4 + e // 8 % 4
    place = e // 4 % 2 * (NUM_IN // 4) + part * (PART // 4) + e % 4 * 4
    pointers = x_ptr + place[:, None] + j
    low = _split(_load_words(pointers, part, first, NUM_IN), lanes)
    return low + _split(_load_words(pointers + PART // 8, part, first, NUM_IN), lanes)


@gluon.jit
def _load_parts(value_ptr, first: gl.constexpr, lanes: gl.constexpr, NUM_IN: gl.constexpr):
    """Numbers [E] of the row's parts: 0 where there is none."""
    e = gl.arange(0, 32 * gl.num_warps(), layout=lanes)
    part = _part(e, first)
    return gl.load(value_ptr + part, mask=part < NUM_IN // PART, other=0.0)


@gluon.jit
def _pair(values_EH, lanes: gl.constexpr):
    first, second = gl.split(values_EH.to(gl.float32))
    first = gl.convert_layout(first, lanes, assert_trivial=True)
    return first, gl.convert_layout(second, lanes, assert_trivial=True)


@gluon.jit
def _multiply(sums, slot, inputs, lanes: gl.constexpr, BY_GROUP: gl.constexpr):
    """Sums of a thread's rows, and the products of a chunk."""
    a0, a1, a2, a3 = _split(slot[0], lanes)
    b0, b1, b2, b3 = _split(slot[1], lanes)
    y, z = gl.inline_asm_elementwise(
        _MULTIPLY, "=r,=r" + ",r" * 16,
        [a0, a1, a2, a3, b0, b1, b2, b3, inputs[0], inputs[1], inputs[2], inputs[3], inputs[4],
         inputs[5], inputs[6], inputs[7]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    y, z = y.to(gl.float32), z.to(gl.float32)
    if len(slot) > 3:
        zero_y, zero_z = _pair(slot[3], lanes)
        y, z = y - zero_y * inputs[8], z - zero_z * inputs[8]
    scale_y, scale_z = _pair(slot[2], lanes)
    if BY_GROUP:
        x_scale = inputs[len(inputs) - 1]
        scale_y, scale_z = scale_y * x_scale, scale_z * x_scale
    return sums[0] + y * scale_y, sums[1] + z * scale_z


@gluon.jit
def _multiply_quad(
    slots, inputs, pointers, after, lanes: gl.constexpr, sizes: gl.constexpr,
    BY_GROUP: gl.constexpr,
):  # fmt: skip
    """Sums of what slots hold; what the quad `after` needs, if there is one, comes there."""
    y = gl.zeros([32 * gl.num_warps()], gl.float32, layout=lanes)
    sums = (y, y)
    for slot in gl.static_range(len(slots)):
        sums = _multiply(sums, slots[slot], inputs[slot], lanes, BY_GROUP)
        if after is not None:
            loaded = _load_slot(pointers, after, slot * gl.num_warps(), sizes)
            slots = slots[:slot] + (loaded,) + slots[slot + 1 :]
    return sums, slots


@gluon.jit
def _store(sums, quad, factor, bias_ptr, out_ptr, lanes: gl.constexpr):
    """A quad's results, added up over parts."""
    WARPS: gl.constexpr = gl.num_warps()
    e = gl.arange(0, 32 * WARPS, layout=lanes)
    is_ours = e % 4 == e // 4 % 4
    y = gl.join(gl.where(is_ours, sums[0], 0.0), gl.where(is_ours, sums[1], 0.0))
    y = gl.sum(gl.sum(y.reshape([WARPS, 2, 16, 2]), 2), 0).reshape([ROWS]) * factor
    row = quad * ROWS + gl.arange(0, ROWS, layout=y.type.layout)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + row).to(gl.float32)
    gl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def _int4_matvec_kernel(
    x_ptr,
    x_scale_ptr,
    x_sum_ptr,
    word_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    NUM_OUT: gl.constexpr,
    NUM_IN: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
    BY_GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Rows by quads, of which each program has those that follow one another. What is not there is
    None."""
    WARPS: gl.constexpr = gl.num_warps()
    QUADS: gl.constexpr = NUM_OUT // ROWS
    SLOTS: gl.constexpr = (NUM_IN + WARPS * CHUNK - 1) // (WARPS * CHUNK)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    sizes: gl.constexpr = (NUM_OUT, NUM_IN, GROUP)
    pointers = (word_ptr, scale_ptr, zero_ptr)
    quad = gl.program_id(0) * QUADS // PROGRAMS
    end = (gl.program_id(0) + 1) * QUADS // PROGRAMS
    slots = ()
    for slot in gl.static_range(SLOTS):
        slots = slots + (_load_slot(pointers, quad, slot * WARPS, sizes),)  # type: ignore[assignment]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = ()
    for slot in gl.static_range(SLOTS):
        words = _load_inputs(x_ptr, slot * WARPS, lanes, NUM_IN)
        if zero_ptr is not None:
            words = words + (_load_parts(x_sum_ptr, slot * WARPS, lanes, NUM_IN) * (1.0 / UNIT),)
        if BY_GROUP:
            words = words + (_load_parts(x_scale_ptr, slot * WARPS, lanes, NUM_IN),)
        inputs = inputs + (words,)  # type: ignore[assignment]
    factor = UNIT
    if not BY_GROUP:
        factor = gl.load(x_scale_ptr) * UNIT
    while quad < end - 1:
        sums, slots = _multiply_quad(slots, inputs, pointers, quad + 1, lanes, sizes, BY_GROUP)
        _store(sums, quad, factor, bias_ptr, out_ptr, lanes)
        quad += 1
    sums, slots = _multiply_quad(slots, inputs, pointers, None, lanes, sizes, BY_GROUP)
    _store(sums, quad, factor, bias_ptr, out_ptr, lanes)


def int4_matvec(
    row: QuantizedRows,
    weight: Packed,
    bias_O: Tensor | None,
    out_1O: Tensor,
    config: Int4RowConfig,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b of one row of 16 bits, for a weight that it `walks_over`; rounded as by
    `integer_matvec`.

    The row is in the weight's `row_form`.
    """
    num_out, num_in = weight.shape
    assert row.form == row_form(weight, 1) and row.shape == (1, num_in)
    assert out_1O.shape == (1, num_out)
    num_sms = torch.cuda.get_device_properties(out_1O.device).multi_processor_count
    num_programs = min(config.programs_per_sm * num_sms, num_out // ROWS.value)
    _int4_matvec_kernel[(num_programs,)](
        row.codes_TPI.view(torch.int32),
        row.scales_TG,
        row.sums_TN,
        weight.codes_OB.view(torch.int32),
        weight.scales_OG,
        weight.zeros_OG,
        bias_O,
        out_1O,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        GROUP=weight.group_size,
        PROGRAMS=num_programs,
        BY_GROUP=row.form.by_group,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
        **dependent_launch(pdl, out_1O),
    )
