"""Products of one row with weights in FP8 on Hopper's tensor cores.

A step at one stream waits for weights, and what reads them at 4 TB/s takes an H200 to its 700
watts: from there on clocks fall, and the memory's speed with them. So work for each byte counts.
Here a program, of which two to four are on each multiprocessor, makes the norm once and walks over
tiles of the weight's rows; a load of a warp is 512 bytes of one row, in whole cache lines; and
tensor cores multiply codes for 1.1 instructions each, where vectors take 2.6.

An instruction multiplies 16 rows by 8 columns, and there is one. A warp has eight parts of two rows
for its 16, and the same parts of the input for its columns: what it needs is on the diagonal. Codes
become float16, which they are exactly. Inputs do, too, times a power of two for each 128, with
which the largest is 2^14 or more. Sums are in float32.

Shape legend: I inputs, O outputs; R rows of a tile, W words of 4 bytes of a chunk, of which a row
has 1 KiB; M parts of a tile's rows, N parts of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.matvec_config import LONG_OUTPUTS, NUM_SMS
from services.compute.kernels.rows.activations import act_mul_rounded
from services.compute.kernels.rows.add_norm import (
    NormedInput,
    add_delta,
    apply_weight,
    norm_form,
    normalize,
)

if TYPE_CHECKING:
    from services.compute.layers.parts import Activation

NUM_WARPS = 4
ROWS = 2 * NUM_WARPS
"""Of a tile."""

CHUNK = gl.constexpr(1024)
"""Codes of a row that a warp loads at once."""

PART = gl.constexpr(128)
"""Of them in one of eight parts."""

MIN_INPUTS = 4096
"""Rows of fewer are as fast by programs of one block (1B: 24.4 us a layer for 24.2)."""

MAX_NORMED_INPUTS = 8192
"""A program has all of them in registers, 64 a thread."""

MAX_INPUTS = 32768
"""64 KiB of shared memory for each program."""


@dataclass(frozen=True, slots=True)
class WalkConfig:
    """How many programs walk, and how many chunks of each warp are on their way."""

    programs_per_sm: int
    num_slots: int
    max_registers: int


def walk_config(num_in: int, *, pdl: bool) -> WalkConfig:
    """By a sweep on an H200 (benchmarks/results/gpu_packed.md)."""
    if pdl:
        return WalkConfig(4, 2, 128)
    return WalkConfig(3, 2, 168) if num_in <= MIN_INPUTS else WalkConfig(2, 4, 255)


def suits(codes_OI: Tensor, normed: NormedInput, out_TO: Tensor, *, gated: bool, pdl: bool) -> bool:
    """Whether this is faster than programs of one block.

    An input without a norm is read by every program before it multiplies, which costs nothing
    where programs start before it is there, and more than it gains elsewhere: down of 70B takes
    60.8 us for 56.9.
    """
    x_TI, num_in, has_norm = normed.x_TE, codes_OI.shape[1], normed.norm is not None
    if not x_TI.is_cuda or torch.cuda.get_device_capability(x_TI.device) != HOPPER:
        return False
    return (
        codes_OI.dtype == torch.uint8
        and x_TI.element_size() == 2
        and (pdl or has_norm)
        and codes_OI.shape[0] % (2 * ROWS if gated else ROWS) == 0
        and NUM_SMS * ROWS <= codes_OI.shape[0]
        and out_TO.shape[1] < LONG_OUTPUTS
        and num_in % CHUNK.value == 0
        and MIN_INPUTS <= num_in <= (MAX_NORMED_INPUTS if has_norm else MAX_INPUTS)
    )


@gluon.constexpr_function
def _in_turn(size: int, warps: int) -> gl.DistributedLinearLayout:
    """Inputs, eight in a row of each thread and a chunk of each warp; no fewer than that takes."""
    places = [[1 << bit] for bit in range(size.bit_length() - 1)]
    end = 10 + warps.bit_length() - 1
    ours = [*places[:3], *places[8:10], *places[end:]]
    return gl.DistributedLinearLayout(ours, places[3:8], places[10:end], [], [size])


@gluon.constexpr_function
def _lines(warps: int) -> gl.DistributedLinearLayout:
    """Words of a chunk of a tile's rows: two rows of each warp, 512 bytes at once."""
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    others = [[2 << bit, 0] for bit in range(warps.bit_length() - 1)]
    ours = [[0, 1], [0, 2], [0, 128], [1, 0]]
    return gl.DistributedLinearLayout(ours, lanes, others, [], [2 * warps, 256])


@gluon.constexpr_function
def _columns(warps: int) -> gl.DistributedLinearLayout:
    """Inputs of a chunk as tensor cores read them, in the order in which `_keep` stores them."""
    ours = [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        ours, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [8, 128]
    )


@gluon.jit
def _load_chunk(words_RW, tile, chunk, sizes: gl.constexpr):
    """Words of a tile's chunk."""
    NUM_IN, OUTPUTS = sizes
    at = tile.to(gl.int64) * (OUTPUTS * NUM_IN // 4) + chunk * 256
    return gl.load(words_RW + at, eviction_policy="evict_first")


_DECODE = gl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $4;"
    "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;"
    "mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }"
)


@gluon.jit
def _numbers(words_RW, operand: gl.constexpr):
    """What words stand for, [M, …], in the registers that they are in: an instruction takes two
    codes of a word, and those that lie 512 bytes behind."""
    R: gl.constexpr = words_RW.shape[0]
    a, b, c, d = gl.inline_asm_elementwise(
        _DECODE, "=h,=h,=h,=h,r", [words_RW],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    joined = gl.join(gl.join(a, c), gl.join(b, d)).reshape([R, 2, 8, 4, 4, 2, 2])
    numbers = joined.permute([0, 2, 4, 5, 1, 3, 6]).reshape([8 * R, PART])
    return gl.convert_layout(numbers, operand, assert_trivial=True)


@gluon.jit
def _keep(x_I, kept, first: gl.constexpr):
    """Inputs to shared memory, from a chunk on, as `_columns` reads them; and what products are to
    be multiplied by."""
    inputs, scales = kept
    C: gl.constexpr = x_I.shape[0] // CHUNK
    x = x_I.reshape([C, 2, 8, 4, 4, 2, 2]).permute([0, 2, 4, 3, 5, 1, 6]).reshape([C, 8, PART])
    wide = x.to(gl.float32)
    bits = wide.to(gl.int32, bitcast=True) & 0x7F800000
    scale = gl.maximum(gl.max(bits, 2), 15 << 23) - (14 << 23)
    factor = ((254 << 23) - scale).to(gl.float32, bitcast=True)
    inputs.slice(first, C, dim=0).store((wide * factor[:, :, None]).to(gl.float16))
    scales.slice(first, C, dim=0).store(scale.to(gl.float32, bitcast=True))


@gluon.jit
def _normed_row(
    x_ptr, delta_ptr, norm_ptr, norm_bias_ptr, post_ptr, sum_ptr, eps, post_eps, scale, i_I,
    NUM_IN: gl.constexpr, NORM: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """The norm of x + scale * post(delta), which the first program writes."""
    inside = i_I < NUM_IN
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    x = gl.load(x_ptr + i_I, mask=inside, other=0.0)
    weight = gl.load(norm_ptr + i_I, mask=inside, other=0.0)
    bias = None
    if norm_bias_ptr is not None:
        bias = gl.load(norm_bias_ptr + i_I, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = gl.load(delta_ptr + i_I, mask=inside, other=0.0)
        post = None
        if post_ptr is not None:
            post = gl.load(post_ptr + i_I, mask=inside, other=0.0)
        x = add_delta(
            x.to(gl.float32), delta.to(gl.float32), inside, post, post_eps, scale, NUM_IN, POST,
            dtype,
        )  # fmt: skip
    if sum_ptr is not None:
        gl.store(sum_ptr + i_I, x, mask=inside & (gl.program_id(0) == 0))
    normal = normalize(x.to(gl.float32), inside, eps, NUM_IN, NORM)
    return apply_weight(normal, weight, bias, NORM, dtype)


@gluon.jit
def _keep_row(x_ptr, kept, NUM_IN: gl.constexpr):
    """A row as it is: four chunks at a time, eight more on their way."""
    CHUNKS: gl.constexpr = kept[0].shape[0]
    AT_ONCE: gl.constexpr = 4
    SIZE: gl.constexpr = AT_ONCE * CHUNK
    i_I = gl.arange(0, SIZE, layout=_in_turn(SIZE, gl.num_warps()))
    x = gl.load(x_ptr + i_I, mask=i_I < NUM_IN, other=0.0)
    behind = gl.load(x_ptr + SIZE + i_I, mask=SIZE + i_I < NUM_IN, other=0.0)
    for first in gl.static_range(0, CHUNKS, AT_ONCE):
        if first * CHUNK < NUM_IN:
            after_I = i_I + (first * CHUNK + 2 * SIZE)
            last = gl.load(x_ptr + after_I, mask=after_I < NUM_IN, other=0.0)
            _keep(x, kept, first)
            x, behind = behind, last


@gluon.jit
def _multiply(acc_MN, words_RW, kept, chunk):
    """Sums, and the products of a chunk."""
    inputs, scales = kept
    sums: gl.constexpr = acc_MN.type.layout
    numbers = _numbers(words_RW, gl.DotOperandLayout(0, sums, 2))
    x = inputs.index(chunk).load(_columns(gl.num_warps())).reshape([8, 4, 4, 2, 2, 2])
    x = x.permute([1, 3, 4, 2, 5, 0]).reshape([PART, 8])
    x = gl.convert_layout(x, gl.DotOperandLayout(1, sums, 2), assert_trivial=True)
    scale_N = scales.index(chunk).load(gl.SliceLayout(0, sums))
    return acc_MN + mma_v2(numbers, x, gl.zeros_like(acc_MN)) * scale_N[None, :]


@gluon.jit
def _turn(
    acc_MN, slots, kept, chunk, words_RW, tile, later, FROM: gl.constexpr, TO: gl.constexpr,
    sizes: gl.constexpr,
):  # fmt: skip
    """Multiply what slots hold, the first of all a tile's `chunk`; ask for what they hold next:
    the first the chunk `later` of another tile or of this one, or nothing."""
    for slot in gl.static_range(FROM, TO):
        acc_MN = _multiply(acc_MN, slots[slot], kept, chunk + slot)
        if tile is not None:
            words = _load_chunk(words_RW, tile, later + slot, sizes)
            slots = slots[:slot] + (words,) + slots[slot + 1 :]
    return acc_MN, slots


@gluon.jit
def _multiply_tile(slots, kept, words_RW, tile, after, sums: gl.constexpr, sizes: gl.constexpr):
    """Sums of a tile, whose first chunks are in slots; those of the one `after` come there."""
    CHUNKS: gl.constexpr = sizes[0] // CHUNK
    SLOTS: gl.constexpr = len(slots)
    REST: gl.constexpr = CHUNKS % SLOTS
    LAST: gl.constexpr = CHUNKS - REST - SLOTS
    acc = gl.zeros([16 * gl.num_warps(), 8], gl.float32, layout=sums)
    for chunk in range(0, LAST, SLOTS):
        acc, slots = _turn(acc, slots, kept, chunk, words_RW, tile, chunk + SLOTS, 0, SLOTS, sizes)
    # the first slots may have one more chunk of this tile
    acc, slots = _turn(acc, slots, kept, LAST, words_RW, tile, LAST + SLOTS, 0, REST, sizes)
    acc, slots = _turn(acc, slots, kept, LAST, words_RW, after, 0, REST, SLOTS, sizes)
    return _turn(acc, slots, kept, LAST + SLOTS, words_RW, after, 0, 0, REST, sizes)


@gluon.jit
def _store(
    acc_MN, tile, scale_ptr, bias_ptr, out_ptr, dtype: gl.constexpr, NUM_OUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """A tile's results: what lies on the diagonal, added up by row."""
    M: gl.constexpr = acc_MN.shape[0]
    ROWS: gl.constexpr = M // 8
    OUTPUTS: gl.constexpr = ROWS if ACTIVATION is None else ROWS // 2
    sums: gl.constexpr = acc_MN.type.layout
    m = gl.arange(0, M, layout=gl.SliceLayout(1, sums))
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, sums))
    y = gl.sum(gl.where((m % 8)[:, None] == n[None, :], acc_MN, 0.0), 1)
    y = gl.sum(y.reshape([ROWS, 8]), 1)
    y = gl.convert_layout(y, gl.BlockedLayout([ROWS], [32], [gl.num_warps()], [0]))
    row = gl.arange(0, ROWS, layout=y.type.layout)
    row = tile * OUTPUTS + row % OUTPUTS + row // OUTPUTS * NUM_OUT
    y *= gl.load(scale_ptr + row).to(gl.float32)
    if ACTIVATION is not None:
        gate, up = gl.split(y.reshape([2, OUTPUTS]).permute([1, 0]))
        y = act_mul_rounded(gate, up, ACTIVATION, dtype)
        row = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=y.type.layout)
    elif bias_ptr is not None:
        y += gl.load(bias_ptr + row).to(gl.float32)
    gl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def _fp8_matvec_kernel(
    x_ptr,
    delta_ptr,
    norm_ptr,
    word_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    scale_ptr,
    norm_bias_ptr,
    post_ptr,
    eps,
    post_eps,
    scale,
    NUM_OUT: gl.constexpr,
    NUM_IN: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SLOTS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    POST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles program, program + PROGRAMS, … of eight rows: gates and ups, with an activation. What
    is not there is None."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 2 * WARPS
    OUTPUTS: gl.constexpr = ROWS if ACTIVATION is None else ROWS // 2
    TILES: gl.constexpr = NUM_OUT // OUTPUTS
    PADDED: gl.constexpr = triton.next_power_of_2(NUM_IN // CHUNK)
    lines: gl.constexpr = _lines(WARPS)
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    sizes: gl.constexpr = (NUM_IN, OUTPUTS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, lines))
    row = row % OUTPUTS + row // OUTPUTS * NUM_OUT
    word = gl.arange(0, 256, layout=gl.SliceLayout(0, lines))
    words_RW = word_ptr + (row.to(gl.int64) * (NUM_IN // 4))[:, None] + word[None, :]
    tile = gl.program_id(0)
    slots = ()
    for slot in gl.static_range(SLOTS):
        slots = slots + (_load_chunk(words_RW, tile, slot, sizes),)  # type: ignore[assignment]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    turned: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    inputs = gl.allocate_shared_memory(gl.float16, [PADDED, 8, PART], turned)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = gl.allocate_shared_memory(gl.float32, [PADDED, 8], flat)
    if NORM is None:
        _keep_row(x_ptr, (inputs, scales), NUM_IN)
    else:
        i_I = gl.arange(0, PADDED * CHUNK, layout=_in_turn(PADDED * CHUNK, WARPS))
        x_I = _normed_row(
            x_ptr, delta_ptr, norm_ptr, norm_bias_ptr, post_ptr, sum_ptr, eps, post_eps, scale,
            i_I, NUM_IN, NORM, POST,
        )  # fmt: skip
        _keep(x_I, (inputs, scales), 0)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = inputs._reinterpret(gl.float16, [PADDED, 8, PART], numbers)
    kept = inputs, scales._reinterpret(gl.float32, [PADDED, 8], plain)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    while tile + PROGRAMS < TILES:
        acc, slots = _multiply_tile(slots, kept, words_RW, tile, tile + PROGRAMS, sums, sizes)
        _store(acc, tile, scale_ptr, bias_ptr, out_ptr, dtype, NUM_OUT, ACTIVATION)
        tile += PROGRAMS
    acc, slots = _multiply_tile(slots, kept, words_RW, tile, None, sums, sizes)
    _store(acc, tile, scale_ptr, bias_ptr, out_ptr, dtype, NUM_OUT, ACTIVATION)


def fp8_matvec(
    normed: NormedInput,
    codes_OI: Tensor,
    scales_O: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    activation: Activation | None,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b of one row, or act(gate) * up, for a weight that `suits`; rounded as by `matvec`
    and its like."""
    x_TI, delta_TI, norm, sum_TI, post, _ = normed
    num_rows, num_in = codes_OI.shape
    config = walk_config(num_in, pdl=pdl)
    num_sms = torch.cuda.get_device_properties(x_TI.device).multi_processor_count
    num_programs = min(config.programs_per_sm * num_sms, num_rows // ROWS)
    _fp8_matvec_kernel[(num_programs,)](
        x_TI,
        delta_TI,
        None if norm is None else norm.weight_E,
        codes_OI.view(torch.int32),
        bias_O,
        out_TO,
        sum_TI,
        scales_O,
        *normed.rare_operands,
        NUM_OUT=num_rows if activation is None else num_rows // 2,
        NUM_IN=num_in,
        PROGRAMS=num_programs,
        SLOTS=config.num_slots,
        ACTIVATION=activation,
        NORM=norm_form(norm),
        POST=norm_form(post),
        num_warps=NUM_WARPS,
        maxnreg=config.max_registers,
        **dependent_launch(pdl, out_TO),
    )
