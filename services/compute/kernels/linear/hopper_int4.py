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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.compute.kernels.hopper import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    MAX_REGISTERS,
    SWIZZLED,
    boxes,
)
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.hopper_int4_codes import (
    STEP_K,
    decoded,
    divisor,
    group_of,
    of_rows,
    prefetch_group,
    value_of,
)
from services.compute.kernels.linear.hopper_int4_config import (
    CHUNK,
    STEP_IN,
    Int4Config,
    Int4Schedule,
    Int4Work,
    suits,
)
from services.compute.kernels.linear.hopper_int4_sums import PART, meet, store
from services.compute.quantization.packed import Packed

HALF_K = gl.constexpr(64)  # inputs of a swizzled copy of rows: 128 bytes
CODES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
MULTIPLYING_REGISTERS = ATTENDING_REGISTERS


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
def _fetch_first(codes, w_tiles, ready, weight, schedule, sizes: gl.constexpr):
    """Weights of the first steps, and of how many."""
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    BYTES: gl.constexpr = 2 * M * (STEP_K // 2) + (N + TAIL) * STEP_K * 2
    tile, first, last = _segment(0, schedule)
    num_steps = gl.minimum(last - first, STAGES)
    output = tile // schedule[3] * (2 * M)
    for stage in range(num_steps):
        bar = ready.index(stage)
        mbarrier.expect(bar, BYTES)
        column = (first + stage) * (STEP_K // 2)
        tma.async_copy_global_to_shared(codes, [output, column], bar, w_tiles.index(stage))
        if GROUP > 0:
            prefetch_group(weight, first + stage, output, sizes)
    return num_steps


@gluon.jit
def _fetch(codes, xs, buffers, barriers, weight, schedule, sizes: gl.constexpr, PDL: gl.constexpr):
    """The warp that fetches: weights and rows of a step; the first weights before the launch that
    makes the rows has ended."""
    w_tiles, x_buffers, x_tails = buffers[1], buffers[2], buffers[3]
    ready, free = barriers
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    BYTES: gl.constexpr = 2 * M * (STEP_K // 2) + (N + TAIL) * STEP_K * 2
    token_tiles = schedule[3]
    early = _fetch_first(codes, w_tiles, ready, weight, schedule, sizes)
    if PDL:
        gdc_wait()
    count = 0
    for number in range(_num_segments(schedule)):
        tile, first, last = _segment(number, schedule)
        output, token = tile // token_tiles * (2 * M), tile % token_tiles * (N + TAIL)
        for step in range(first, last):
            stage = count % STAGES
            bar = ready.index(stage)
            if count >= early:
                mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
                mbarrier.expect(bar, BYTES)
                column = step * (STEP_K // 2)
                tma.async_copy_global_to_shared(codes, [output, column], bar, w_tiles.index(stage))
                if GROUP > 0:
                    prefetch_group(weight, step, output, sizes)
            for half in gl.static_range(2):
                k = step * STEP_K + half * HALF_K
                place = stage * 2 + half
                tma.async_copy_global_to_shared(xs[0], [token, k], bar, x_buffers.index(place))
                if TAIL > 0:
                    tma.async_copy_global_to_shared(
                        xs[1], [token + N, k], bar, x_tails.index(place)
                    )
            count += 1


@gluon.jit
def _sums(
    HALF: gl.constexpr, buffers, barriers, weight, output, count, first, last, sizes: gl.constexpr
):
    """A warpgroup's sums of a tile's steps first..last; `count` steps are behind this program.

    The next inputs' codes are decoded while those before are multiplied. Nothing is multiplied
    from one turn of the loop into the next: the assembler would let products wait for one another.
    """
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    w_halves, x_buffers, x_tails = buffers[0], buffers[2], buffers[3]
    ready, free = barriers
    dtype: gl.constexpr = x_buffers.dtype
    UNIT: gl.constexpr = 4.0 if dtype == gl.bfloat16 else 1.0
    # inputs that are multiplied at once, and how many times so many a step has
    PIECE: gl.constexpr = HALF_K if GROUP == 0 or GROUP > HALF_K else GROUP
    PIECES: gl.constexpr = STEP_K // PIECE
    FINE: gl.constexpr = GROUP > 0 and GROUP < STEP_K
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    TAIL_N: gl.constexpr = max(TAIL, 16)
    tail_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL_N, 16])
    tail_operand: gl.constexpr = gl.DotOperandLayout(0, tail_sums, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    row_M = output + gl.arange(0, M, layout=gl.SliceLayout(1, sums))
    code_row_M = output + gl.arange(0, M, layout=gl.SliceLayout(1, operand))
    scales, zeros, num_out, _ = weight
    rows = (gl.minimum(row_M, num_out - 1), gl.minimum(code_row_M, num_out - 1))
    acc = gl.zeros([M, N], gl.float32, layout=sums)
    acc_tail = gl.zeros([M, TAIL_N], gl.float32, layout=tail_sums)
    scale_M = gl.full([M], 1.0, gl.float32, layout=gl.SliceLayout(1, sums))
    # of the next piece, and of those behind
    soon, soon_zero = group_of(weight, first, rows, sizes)
    soon_M, zero_M = divisor(soon, scales, GROUP), value_of(soon_zero, zeros)
    later, later_zero = group_of(weight, first, rows, sizes, PIECE if FINE else STEP_K)
    ratio_M = scale_M / soon_M
    mbarrier.wait(ready.index(count % STAGES), count // STAGES & 1)
    w = w_halves.index(count % STAGES * 2 + HALF)
    numbers = decoded(w.slice(0, PIECE // 2, dim=1).load(operand), zero_M, dtype, operand)
    for step in range(first, last):
        stage = count % STAGES
        count += 1
        w = w_halves.index(stage * 2 + HALF)
        behind, behind_zero = later, later_zero
        if GROUP > 0 and not FINE:
            behind, behind_zero = group_of(weight, step + 2, rows, sizes)
        for piece in gl.static_range(PIECES):
            if FINE or (GROUP > 0 and piece == 0):
                acc = acc * ratio_M[:, None]
                if TAIL > 0:
                    acc_tail = acc_tail * _moved(ratio_M, tail_sums)[:, None]
                scale_M = soon_M
            place = stage * 2 + piece * PIECE // HALF_K
            x = x_buffers.index(place).slice(piece * PIECE % HALF_K, PIECE, dim=1)
            acc = warpgroup_mma(numbers, x.permute([1, 0]), acc, is_async=True)
            if TAIL > 0:
                x = x_tails.index(place).slice(piece * PIECE % HALF_K, PIECE, dim=1)
                same = gl.convert_layout(numbers, tail_operand, assert_trivial=True)
                acc_tail = warpgroup_mma(same, x.permute([1, 0]), acc_tail, is_async=True)
            if FINE or (GROUP > 0 and piece > 0):
                soon_M, zero_M = divisor(later, scales, GROUP), value_of(later_zero, zeros)
                ratio_M = scale_M / soon_M
                later, later_zero = behind, behind_zero
            if FINE:
                later, later_zero = group_of(weight, step, rows, sizes, (piece + 2) * PIECE)
            if piece == PIECES - 1:
                goes_on = step + 1 < last  # else what is decoded is not used
                mbarrier.wait(ready.index(count % STAGES), count // STAGES & 1, pred=goes_on)
                w = w_halves.index(count % STAGES * 2 + HALF)
            codes = w.slice((piece + 1) % PIECES * (PIECE // 2), PIECE // 2, dim=1)
            following = decoded(codes.load(operand), zero_M, dtype, operand)
            if TAIL > 0:
                acc, acc_tail = warpgroup_mma_wait(0, deps=[acc, acc_tail])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            numbers = following
        mbarrier.arrive(free.index(stage), count=1)
    if GROUP == 0:
        scale_M = value_of(of_rows(scales, 0, rows[0], num_out), scales)
    unit_M = UNIT * scale_M
    acc_tail = acc_tail * _moved(unit_M, tail_sums)[:, None]
    return acc * unit_M[:, None], acc_tail, count


@gluon.jit
def _moved(x_M, layout: gl.constexpr):
    """Numbers of rows of sums where those of other sums have theirs: nothing moves."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _multiply(
    HALF: gl.constexpr, outs, buffers, barriers, weight, bias, meeting, schedule,
    sizes: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the first or the second half of each tile's outputs."""
    M, N, TAIL, GROUP, STAGES, ZEROS = sizes
    share, steps, token_tiles = schedule[0], schedule[2], schedule[3]
    results = (outs, buffers[4], bias, weight[2])
    count = 0
    for number in range(_num_segments(schedule)):
        tile, first, last = _segment(number, schedule)
        output = tile // token_tiles * (2 * M) + HALF * M
        token = tile % token_tiles * (N + TAIL)
        acc, tail, count = _sums(HALF, buffers, barriers, weight, output, count, first, last, sizes)
        if last - first == steps:
            store(HALF, TAIL, results, acc, tail, output, token)
        else:
            meet(HALF, TAIL, results, meeting, acc, tail, output, token, tile, share, steps)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_out", "share", "total", "steps", "token_tiles"])
def _hopper_int4_kernel(
    codes,
    x,
    x_tail,
    out,
    out_tail,
    scales_GO,
    zeros_GO,
    bias_O,  # or None
    partials,  # [programs, 2, 2, M * (N + TAIL)]: a first and a second tile, two warpgroups
    arrivals,  # [tiles, 2]
    num_out,
    share,
    total,
    steps,
    token_tiles,
    M: gl.constexpr,
    N: gl.constexpr,
    TAIL: gl.constexpr,  # further tokens
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
    x_tails = x_buffers
    staging = gl.allocate_shared_memory(dtype, [2, C, M], OUT_SHARED)
    tail_staging = staging
    if TAIL > 0:
        x_tails = gl.allocate_shared_memory(dtype, [2 * STAGES, TAIL, HALF_K], SHARED)
        tail_staging = staging._reinterpret(dtype, [2 * C // TAIL, TAIL, M], OUT_SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    buffers = (w_halves, w_tiles, x_buffers, x_tails, (staging, tail_staging))
    barriers = (ready, free)
    schedule = (share, total, steps, token_tiles)
    sizes: gl.constexpr = (M, N, TAIL, GROUP, STAGES, ZEROS)
    weight = (scales_GO, zeros_GO, num_out, steps)
    meeting = (partials, arrivals)
    outs = (out, out_tail)
    gl.warp_specialize(
        [
            (_multiply, (0, outs, buffers, barriers, weight, bias_O, meeting, schedule, sizes)),
            (_multiply, (1, outs, buffers, barriers, weight, bias_O, meeting, schedule, sizes)),
            (_fetch, (codes, (x, x_tail), buffers, barriers, weight, schedule, sizes, PDL)),
        ],
        [4, 1],
        [MULTIPLYING, FETCHING],
    )


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
    assert num_in == weight.num_inputs and out_TO.shape == (num_tokens, num_out)
    assert x_TI.is_contiguous() and out_TO.is_contiguous() and x_TI.dtype == out_TO.dtype
    assert suits(weight) and config.is_valid
    assert weight.scales_OG.stride(0) == 1
    assert weight.zeros_OG is None or weight.zeros_OG.stride(0) == 1
    schedule = Int4Schedule.of(num_tokens, num_out, num_in, config, work.num_sms)
    tiles = schedule.total // schedule.steps
    size = 2 * config.rows * config.width
    assert 2 * tiles <= work.arrivals.numel()
    assert 2 * schedule.programs * size <= work.partial.numel()
    chunk = min(config.tokens, CHUNK)
    out_layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, 2 * config.rows), element_bitwidth=16, rank=2
    )
    _hopper_int4_kernel[(schedule.programs,)](
        boxes(weight.codes_OB, 2 * config.rows, STEP_IN // 2, CODES),
        boxes(x_TI, config.tokens, 64),
        boxes(x_TI, config.tail or config.tokens, 64),
        boxes(out_TO, chunk, config.rows, out_layout),
        boxes(out_TO, config.tail or chunk, config.rows, out_layout),
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
        TAIL=config.tail,
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
