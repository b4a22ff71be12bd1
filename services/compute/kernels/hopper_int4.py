"""Products of few rows with weights of 4 bits on Hopper.

The product is transposed: weights are the taller operand, 64 or 128 of a tile's outputs for each of
two warpgroups, and tokens are the columns, a power of two. One warp has the copy engine bring codes
and rows of 128 inputs into a ring. A warpgroup decodes codes in the registers that its tensor cores
read them from, while they multiply those before.

Sums are kept in units of the scale of the group that is multiplied: where a group ends, they are
multiplied by the ratio of its scale and the next one's.

A program takes a share of all tiles' steps, which may begin and end within tiles: programs that
share a tile leave their sums in memory, and whichever ends last adds up those of all, always in the
same order (stream-K; Osama et al., 2023).

Shape legend: T rows, I inputs, O outputs; in the kernel M outputs of a warpgroup, N tokens of a
tile, B bytes of codes, C tokens of a part that is stored at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.compute.kernels.hopper_int4_config import (
    CHUNK,
    STEP_IN,
    Int4Config,
    Int4Schedule,
    Int4Work,
)
from services.compute.kernels.hopper_prefill import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    MAX_REGISTERS,
    SWIZZLED,
)
from services.compute.kernels.launch import dependent_launch
from services.compute.quantization.packed import Packed

STEP_K = gl.constexpr(STEP_IN)
PART = gl.constexpr(CHUNK)
HALF_K = gl.constexpr(64)  # inputs of a swizzled copy of rows: 128 bytes
CODES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
MULTIPLYING_REGISTERS = ATTENDING_REGISTERS
SMALLEST_SCALE = gl.constexpr(2.0**-40)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the name in Triton 3.7, in 3.6

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
def _decoded(codes_MB, zero_M, DTYPE: gl.constexpr, operand: gl.constexpr):
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
def _num_segments(schedule):
    """Of this program: tiles, and parts of tiles."""
    share, total, steps = schedule[:3]
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    return (end + steps - 1) // steps - begin // steps


@gluon.jit
def _segment(number, schedule):
    """Which tile, from which step on and up to which.

    All of it follows from `number`: what a loop carries for an inner loop's bounds alone keeps its
    first value (Triton 3.6, 3.7).
    """
    share, total, steps = schedule[:3]
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, total)
    tile = begin // steps + number
    first = gl.maximum(begin - tile * steps, 0)
    last = gl.minimum(end - tile * steps, steps)
    return tile, first, last


@gluon.jit
def _fetch_first(codes, w_tiles, ready, schedule, sizes: gl.constexpr):
    """Weights of the first steps, and of how many."""
    M, N, GROUP, STAGES, ZEROS = sizes
    BYTES: gl.constexpr = 2 * M * (STEP_K // 2) + N * STEP_K * 2
    tile, first, last = _segment(0, schedule)
    num_steps = gl.minimum(last - first, STAGES)
    output = tile // schedule[3] * (2 * M)
    for stage in range(num_steps):
        bar = ready.index(stage)
        mbarrier.expect(bar, BYTES)
        column = (first + stage) * (STEP_K // 2)
        tma.async_copy_global_to_shared(codes, [output, column], bar, w_tiles.index(stage))
    return num_steps


@gluon.jit
def _fetch(codes, x, buffers, barriers, schedule, sizes: gl.constexpr, PDL: gl.constexpr):
    """The warp that fetches: weights and rows of a step; the first weights before the launch that
    makes the rows has ended."""
    w_tiles, x_buffers = buffers[1], buffers[2]
    ready, free = barriers
    M, N, GROUP, STAGES, ZEROS = sizes
    BYTES: gl.constexpr = 2 * M * (STEP_K // 2) + N * STEP_K * 2
    token_tiles = schedule[3]
    early = _fetch_first(codes, w_tiles, ready, schedule, sizes)
    if PDL:
        gdc_wait()
    count = 0
    for number in range(_num_segments(schedule)):
        tile, first, last = _segment(number, schedule)
        output, token = tile // token_tiles * (2 * M), tile % token_tiles * N
        for step in range(first, last):
            stage = count % STAGES
            bar = ready.index(stage)
            if count >= early:
                mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
                mbarrier.expect(bar, BYTES)
                column = step * (STEP_K // 2)
                tma.async_copy_global_to_shared(codes, [output, column], bar, w_tiles.index(stage))
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x, [token, step * STEP_K + half * HALF_K], bar,
                    x_buffers.index(stage * 2 + half),
                )  # fmt: skip
            count += 1


@gluon.jit
def _halves(acc_MN):
    """Of the tokens."""
    M: gl.constexpr = acc_MN.shape[0]
    C: gl.constexpr = acc_MN.shape[1] // 2
    return acc_MN.reshape([M, 2, C]).permute(0, 2, 1).split()


@gluon.jit
def _chunks(acc_MN):
    if acc_MN.shape[1] == 4 * PART:
        low, high = _halves(acc_MN)
        chunks = _halves(low) + _halves(high)
    elif acc_MN.shape[1] == 2 * PART:
        chunks = _halves(acc_MN)
    else:
        chunks = (acc_MN,)
    return chunks


@gluon.jit
def _store_chunk(
    HALF: gl.constexpr, NUMBER: gl.constexpr, out, staging, acc_MC, bias, output, token, num_out
):
    """Round, turn and store the sums of a tile's chunk of tokens, by way of shared memory."""
    M: gl.constexpr = acc_MC.shape[0]
    C: gl.constexpr = acc_MC.shape[1]
    buffer = staging.index(HALF)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    acc_MC = gl.convert_layout(acc_MC, layout)
    if bias is not None:
        o_M = output + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        acc_MC += gl.load(bias + o_M, mask=o_M < num_out, other=0.0).to(gl.float32)[:, None]
    tma.store_wait(0)
    buffer.store(acc_MC.to(buffer.dtype).permute(1, 0))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [token + NUMBER * C, output], buffer)


@gluon.jit
def _store(HALF: gl.constexpr, out, staging, acc, bias, output, token, num_out):
    """A warpgroup's sums of a whole tile."""
    chunks = _chunks(acc)
    for number in gl.static_range(len(chunks)):
        _store_chunk(HALF, number, out, staging, chunks[number], bias, output, token, num_out)


@gluon.jit
def _places(partial, M: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    m_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    c_C = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return partial + m_M[:, None] * C + c_C[None, :]


@gluon.jit
def _leave(partial, acc):
    """A warpgroup's sums of a part of a tile's inputs."""
    chunks = _chunks(acc)
    M: gl.constexpr = acc.shape[0]
    C: gl.constexpr = min(acc.shape[1], PART)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    for number in gl.static_range(len(chunks)):
        at = _places(partial + number * (M * C), M, C)
        gl.store(at, gl.convert_layout(chunks[number], layout))


@gluon.jit
def _added(
    partials, first, last, begin, share, SIZE: gl.constexpr, M: gl.constexpr, C: gl.constexpr
):
    """The sums of programs first..last, in this order. A program whose steps begin before this
    tile's has them in its second place."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    places = _places(partials, M, C)
    total = gl.zeros([M, C], gl.float32, layout=layout)
    for program in range(first, last + 1):
        place = 2 * program + (program * share < begin).to(gl.int32)
        # past the first-level cache, which knows nothing of other programs' writes
        total += gl.load(places + place.to(gl.int64) * SIZE, cache_modifier=".cg")
    return total


@gluon.jit
def _add_and_store(
    HALF: gl.constexpr, out, staging, partials, bias, output, token, num_out, tile, schedule,
    sizes: gl.constexpr,
):  # fmt: skip
    """A warpgroup's sums of a tile that programs share, by the last of them."""
    M, N, GROUP, STAGES, ZEROS = sizes
    SIZE: gl.constexpr = 2 * M * N
    C: gl.constexpr = min(N, PART)
    share, steps = schedule[0], schedule[2]
    begin = tile * steps
    first, last = begin // share, (begin + steps - 1) // share
    for number in gl.static_range(N // C):
        at = partials + number * (M * C)
        total = _added(at, first, last, begin, share, SIZE, M, C)
        _store_chunk(HALF, number, out, staging, total, bias, output, token, num_out)


@gluon.jit
def _per_row(pointer, group, row_M, num_out):
    """A group's scales or zeros."""
    return gl.load(pointer + group * num_out + row_M).to(gl.float32)


@gluon.jit
def _group(
    scales, zeros, step, offset: gl.constexpr, steps, row_M, code_row_M, num_out,
    sizes: gl.constexpr,
):  # fmt: skip
    """Scales and zeros of a step's group; of the last, behind it. No scale is so small that nothing
    can be divided by it."""
    M, N, GROUP, STAGES, ZEROS = sizes
    rows: gl.constexpr = row_M.type.layout
    code_rows: gl.constexpr = code_row_M.type.layout
    scale_M = gl.full([M], 1.0, gl.float32, layout=rows)
    zero_M = gl.zeros([M], gl.float32, layout=code_rows)
    group = 0
    if GROUP > 0:
        group = gl.minimum((step * STEP_K + offset) // GROUP, steps * STEP_K // GROUP - 1)
        scale_M = _per_row(scales, group, row_M, num_out)
        scale_M = gl.where(gl.abs(scale_M) < SMALLEST_SCALE, SMALLEST_SCALE, scale_M)
    if ZEROS:
        zero_M = _per_row(zeros, group, code_row_M, num_out)
    return scale_M, zero_M


@gluon.jit
def _multiply(
    HALF: gl.constexpr, out, buffers, barriers, scales, zeros, bias, partials, arrivals, num_out,
    schedule, sizes: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the first or the second half of each tile's outputs."""
    M, N, GROUP, STAGES, ZEROS = sizes
    w_halves, x_buffers, staging = buffers[0], buffers[2], buffers[3]
    ready, free = barriers
    SIZE: gl.constexpr = M * N
    dtype: gl.constexpr = x_buffers.dtype
    UNIT: gl.constexpr = 4.0 if dtype == gl.bfloat16 else 1.0
    # inputs that are multiplied at once, and how many times so many a step has
    PIECE: gl.constexpr = HALF_K if GROUP == 0 or GROUP > HALF_K else GROUP
    PIECES: gl.constexpr = STEP_K // PIECE
    FINE: gl.constexpr = GROUP > 0 and GROUP < STEP_K
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    operand_rows: gl.constexpr = gl.SliceLayout(1, operand)
    share, steps, token_tiles = schedule[0], schedule[2], schedule[3]
    count = 0
    for number in range(_num_segments(schedule)):
        tile, first, last = _segment(number, schedule)
        output = tile // token_tiles * (2 * M) + HALF * M
        token = tile % token_tiles * N
        row_M = gl.minimum(output + gl.arange(0, M, layout=rows), num_out - 1)
        code_row_M = gl.minimum(output + gl.arange(0, M, layout=operand_rows), num_out - 1)
        acc = gl.zeros([M, N], gl.float32, layout=sums)
        scale_M = gl.full([M], 1.0, gl.float32, layout=rows)
        # of the next piece, and of the one behind
        soon_M, zero_M = _group(scales, zeros, first, 0, steps, row_M, code_row_M, num_out, sizes)
        later_M, later_zero_M = soon_M, zero_M
        if FINE:
            later_M, later_zero_M = _group(
                scales, zeros, first, PIECE, steps, row_M, code_row_M, num_out, sizes
            )
        mbarrier.wait(ready.index(count % STAGES), count // STAGES & 1)
        w = w_halves.index(count % STAGES * 2 + HALF)
        numbers = _decoded(w.slice(0, PIECE // 2, dim=1).load(operand), zero_M, dtype, operand)
        if FINE:
            zero_M = later_zero_M
        for step in range(first, last):
            stage = count % STAGES
            count += 1
            w = w_halves.index(stage * 2 + HALF)
            for piece in gl.static_range(PIECES):
                if FINE or (GROUP > 0 and piece == 0):
                    acc = acc * (scale_M / soon_M)[:, None]
                    scale_M = soon_M
                x = x_buffers.index(stage * 2 + piece * PIECE // HALF_K)
                x = x.slice(piece * PIECE % HALF_K, PIECE, dim=1)
                acc = warpgroup_mma(numbers, x.permute([1, 0]), acc, is_async=True)
                if FINE:
                    soon_M, zero_M = later_M, later_zero_M
                    later_M, later_zero_M = _group(
                        scales,
                        zeros,
                        step,
                        (piece + 2) * PIECE,
                        steps,
                        row_M,
                        code_row_M,
                        num_out,
                        sizes,
                    )
                elif GROUP > 0 and piece == 0:
                    later_M, later_zero_M = _group(
                        scales, zeros, step + 1, 0, steps, row_M, code_row_M, num_out, sizes
                    )
                elif GROUP > 0:
                    soon_M, zero_M = later_M, later_zero_M
                if piece == PIECES - 1:
                    goes_on = step + 1 < last  # else what is decoded is not used
                    mbarrier.wait(ready.index(count % STAGES), count // STAGES & 1, pred=goes_on)
                    w = w_halves.index(count % STAGES * 2 + HALF)
                codes = w.slice((piece + 1) % PIECES * (PIECE // 2), PIECE // 2, dim=1)
                following = _decoded(codes.load(operand), zero_M, dtype, operand)
                acc = warpgroup_mma_wait(0, deps=[acc])
                numbers = following
            mbarrier.arrive(free.index(stage), count=1)
        if GROUP == 0:
            scale_M = _per_row(scales, 0, row_M, num_out)
        acc = acc * (UNIT * scale_M)[:, None]
        if last - first == steps:
            _store(HALF, out, staging, acc, bias, output, token, num_out)
        else:
            second = (gl.program_id(0) * share < tile * steps).to(gl.int32)
            own = 4 * gl.program_id(0) + 2 * second + HALF
            _leave(partials + own.to(gl.int64) * SIZE, acc)
            # All threads' sums are written before the one thread that says so releases them; the
            # program that finds itself last acquires everybody's.
            _barrier()
            counter = arrivals + tile * 2 + HALF
            arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == ((tile + 1) * steps - 1) // share - tile * steps // share:
                gl.store(counter, 0)
                _add_and_store(
                    HALF, out, staging, partials + HALF * SIZE, bias, output, token, num_out, tile,
                    schedule, sizes,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_out", "share", "total", "steps", "token_tiles"])
def _hopper_int4_kernel(
    codes,
    x,
    out,
    scales_GO,
    zeros_GO,
    bias_O,  # or None
    partials,  # [programs, 2, 2, M * N]: of a first and a second shared tile, of both warpgroups
    arrivals,  # [tiles, 2]
    num_out,
    share,
    total,
    steps,
    token_tiles,
    M: gl.constexpr,
    N: gl.constexpr,
    GROUP: gl.constexpr,  # inputs; 0: all
    STAGES: gl.constexpr,
    ZEROS: gl.constexpr,
    CODES_SHARED: gl.constexpr,
    SHARED: gl.constexpr,
    OUT_SHARED: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    C: gl.constexpr = min(N, PART)
    w_halves = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, M, STEP_K // 2], CODES_SHARED)
    w_tiles = w_halves._reinterpret(gl.uint8, [STAGES, 2 * M, STEP_K // 2], CODES_SHARED)
    x_buffers = gl.allocate_shared_memory(dtype, [2 * STAGES, N, HALF_K], SHARED)
    staging = gl.allocate_shared_memory(dtype, [2, C, M], OUT_SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    buffers = (w_halves, w_tiles, x_buffers, staging)
    barriers = (ready, free)
    schedule = (share, total, steps, token_tiles)
    sizes: gl.constexpr = (M, N, GROUP, STAGES, ZEROS)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, out, buffers, barriers, scales_GO, zeros_GO, bias_O, partials, arrivals,
                    num_out, schedule, sizes,
                ),
            ),
            (
                _multiply,
                (
                    1, out, buffers, barriers, scales_GO, zeros_GO, bias_O, partials, arrivals,
                    num_out, schedule, sizes,
                ),
            ),
            (_fetch, (codes, x, buffers, barriers, schedule, sizes, PDL)),
        ],
        [4, 1],
        [MULTIPLYING, FETCHING],
    )  # fmt: skip


def hopper_int4(
    x_TI: Tensor,
    weight: Packed,
    bias_O: Tensor | None,
    out_TO: Tensor,
    work: Int4Work,
    config: Int4Config,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b; sums in float32 are rounded once. Rows are of one 16-bit dtype and contiguous,
    scales of a group's rows are adjacent, zeros are whole numbers."""
    num_tokens, num_in = x_TI.shape
    num_out, num_groups = weight.scales_OG.shape
    group = weight.group_size if num_groups > 1 else 0
    assert weight.kind == "int4" and weight.order_I is None
    assert num_in == weight.num_inputs and out_TO.shape == (num_tokens, num_out)
    assert x_TI.is_contiguous() and out_TO.is_contiguous() and x_TI.dtype == out_TO.dtype
    assert num_in % STEP_IN == 0 and num_out % 8 == 0
    assert group % STEP_IN == 0 or group in (32, 64)
    assert weight.scales_OG.stride(0) == 1
    assert weight.zeros_OG is None or weight.zeros_OG.stride(0) == 1
    schedule = Int4Schedule.of(num_tokens, num_out, num_in, config, work.num_sms)
    tiles = schedule.total // schedule.steps
    size = 2 * config.rows * config.tokens
    assert 2 * tiles <= work.arrivals.numel()
    assert 2 * schedule.programs * size <= work.partial.numel()
    out_layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * config.rows), element_bitwidth=16, rank=2
    )
    _hopper_int4_kernel[(schedule.programs,)](
        _boxes(weight.codes_OB, 2 * config.rows, STEP_IN // 2, CODES),
        _boxes(x_TI, config.tokens, 64, SWIZZLED),
        _boxes(out_TO, min(config.tokens, CHUNK), config.rows, out_layout),
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        bias_O,
        work.partial,
        work.arrivals,
        num_out,
        schedule.share,
        schedule.total,
        schedule.steps,
        schedule.token_tiles,
        M=config.rows,
        N=config.tokens,
        GROUP=group,
        STAGES=config.num_stages,
        ZEROS=weight.zeros_OG is not None,
        CODES_SHARED=CODES,
        SHARED=SWIZZLED,
        OUT_SHARED=out_layout,
        MULTIPLYING=MULTIPLYING_REGISTERS,
        FETCHING=FETCHING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(pdl, out_TO),
    )


def _boxes(
    tensor: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """What the copy engine takes of a tensor at once."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def suits(weight: Packed, dtype: torch.dtype) -> bool:
    """Whether there is such a product of rows of this dtype."""
    group, num_groups = weight.group_size, weight.scales_OG.shape[1]
    fits = num_groups == 1 or group % STEP_IN == 0 or group in (32, 64)
    is_wide = weight.num_inputs % STEP_IN == 0 and weight.shape[0] % 8 == 0
    known = dtype in (torch.bfloat16, torch.float16) and weight.order_I is None
    return weight.kind == "int4" and fits and is_wide and known
