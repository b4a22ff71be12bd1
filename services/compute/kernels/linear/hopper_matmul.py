"""Products of more than 64 rows on Hopper: gates and ups with the activation behind them, and those
of rows that do not depend on their batch.

The product is transposed: weights are the taller operand, 64 rows of a tile for each of two
warpgroups, and tokens are the columns, a power of two and perhaps a second, smaller one, so that
160 tokens are 128 and 32. One warp has the copy engine bring blocks of 64 inputs into a ring. A
program takes tiles in turn, and every sum is of all inputs from the first to the last, 16 by 16: it
has the bits that `matmul` gives it, whatever the tile.

Gates and ups are eight rows of each in turn in shared memory, so that a thread has both sums of a
result.

Shape legend: T rows, I inputs, O outputs, F inner width of the MLP; in the kernel M rows of weights
of a warpgroup, C tokens of a chunk that is stored at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

from services.compute.kernels.hopper import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    MAX_REGISTERS,
    SWIZZLED,
    boxes,
)
from services.compute.kernels.linear.hopper_matmul_config import (
    BLOCK_IN,
    BLOCK_OUT,
    CHUNK,
    GROUP,
    HopperTile,
    HopperTiling,
)
from services.compute.kernels.rows.activations import act_mul_rounded

if TYPE_CHECKING:
    from services.compute.layers.parts import Activation

BLOCK_K = gl.constexpr(BLOCK_IN)
PART = gl.constexpr(CHUNK)
M = gl.constexpr(BLOCK_OUT // 2)
TILES_AT_ONCE = gl.constexpr(GROUP)
INTERLEAVED = 8  # rows of gates, then of ups: those that a thread's two rows of sums lie apart
MULTIPLYING_REGISTERS = ATTENDING_REGISTERS
WEIGHTS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
GATED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


@gluon.jit
def _num_tiles(schedule):
    """Of this program."""
    token_tiles, out_tiles, steps = schedule
    programs = gl.num_programs(0)
    return (token_tiles * out_tiles - gl.program_id(0) + programs - 1) // programs


@gluon.jit
def _place(number, schedule, TOKENS: gl.constexpr):
    """A tile's first row of weights and first token. Some tiles of tokens share each weight, one
    after the other."""
    token_tiles, out_tiles, steps = schedule
    tile = number * gl.num_programs(0) + gl.program_id(0)
    width = TILES_AT_ONCE * out_tiles
    first = tile // width * TILES_AT_ONCE
    size = gl.minimum(token_tiles - first, TILES_AT_ONCE)
    within = tile % width
    return within // size * (2 * M), (first + within % size) * TOKENS


@gluon.jit
def _fetch(weights, x_main, x_tail, buffers, barriers, schedule, sizes: gl.constexpr):
    """The warp that fetches: weights and tokens of a step."""
    w_tiles, main_buffers, tail_buffers = buffers[1], buffers[2], buffers[3]
    ready, free = barriers
    MAIN, TAIL, STAGES, COPIES, ACTIVATION = sizes
    BYTES: gl.constexpr = (2 * M + MAIN + TAIL) * BLOCK_K * 2
    count = 0
    for number in range(_num_tiles(schedule)):
        row, token = _place(number, schedule, MAIN + TAIL)
        for step in range(schedule[2]):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BYTES)
            k = step * BLOCK_K
            if ACTIVATION is None:
                tma.async_copy_global_to_shared(weights, [row, k], bar, w_tiles.index(stage))
            else:
                tma.async_copy_global_to_shared(
                    weights, [row // 16, 0, 0, k], bar, w_tiles.index(stage)
                )
            tma.async_copy_global_to_shared(x_main, [token, k], bar, main_buffers.index(stage))
            if TAIL > 0:
                tma.async_copy_global_to_shared(
                    x_tail, [token + MAIN, k], bar, tail_buffers.index(stage)
                )
            count += 1


@gluon.jit
def _halves(acc_MN):
    """Of the tokens."""
    C: gl.constexpr = acc_MN.shape[1] // 2
    return acc_MN.reshape([M, 2, C]).permute(0, 2, 1).split()


@gluon.jit
def _chunks(acc_MN):
    low, high = _halves(acc_MN)
    if acc_MN.shape[1] == 4 * PART:
        chunks = _halves(low) + _halves(high)
    else:
        chunks = (low, high)
    return chunks


@gluon.jit
def _store_chunk(
    HALF: gl.constexpr, NUMBER: gl.constexpr, outs, staging, acc_MC, bias, row, token,
    sizes: gl.constexpr,
):  # fmt: skip
    """Gate or add the bias to the sums of a chunk of tokens, round, turn and store them, by way of
    shared memory."""
    MAIN, TAIL, STAGES, COPIES, ACTIVATION = sizes
    OF_TAIL: gl.constexpr = NUMBER * PART == MAIN
    place: gl.constexpr = HALF * COPIES + NUMBER % COPIES
    if OF_TAIL:
        out, buffer = outs[1], staging[1].index(place * (PART // TAIL))
    else:
        out, buffer = outs[0], staging[0].index(place)
    C: gl.constexpr = acc_MC.shape[1]
    if ACTIVATION is None:
        column = row
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        result = gl.convert_layout(acc_MC, layout)
        if bias[0] is not None:
            row_M = row + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
            bias_M = gl.load(bias[0] + row_M, mask=row_M < bias[1], other=0.0)
            result += bias_M.to(gl.float32)[:, None]
    else:
        column = row // 2
        gate, up = acc_MC.reshape([M // 16, 2, 8, C]).permute(0, 2, 3, 1).split()
        result = act_mul_rounded(gate, up, ACTIVATION, buffer.dtype).reshape([M // 2, C])
    tma.store_wait(COPIES - 1)
    buffer.store(result.to(buffer.dtype).permute(1, 0))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [token + NUMBER * PART, column], buffer)


@gluon.jit
def _multiply(HALF: gl.constexpr, outs, buffers, barriers, bias, schedule, sizes: gl.constexpr):
    """A warpgroup: the first or the second half of each tile's rows of weights."""
    MAIN, TAIL, STAGES, COPIES, ACTIVATION = sizes
    w_halves, main_buffers, tail_buffers = buffers[0], buffers[2], buffers[3]
    ready, free = barriers
    TAIL_ROWS: gl.constexpr = TAIL if TAIL > 0 else PART
    staging = (buffers[4], buffers[5])
    main_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    tail_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL_ROWS, 16])
    count = 0
    for number in range(_num_tiles(schedule)):
        row, token = _place(number, schedule, MAIN + TAIL)
        row += HALF * M
        acc = gl.zeros([M, MAIN], gl.float32, layout=main_sums)
        tail = gl.zeros([M, TAIL_ROWS], gl.float32, layout=tail_sums)
        for step in range(schedule[2]):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            w = w_halves.index(stage * 2 + HALF)
            acc = warpgroup_mma(w, main_buffers.index(stage).permute([1, 0]), acc, is_async=True)
            if TAIL > 0:
                tail = warpgroup_mma(
                    w, tail_buffers.index(stage).permute([1, 0]), tail, is_async=True
                )
                acc, tail = warpgroup_mma_wait(2, deps=[acc, tail])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            # the step before has been multiplied
            mbarrier.arrive(free.index((count - 1 + STAGES) % STAGES), count=1, pred=step > 0)
            count += 1
        if TAIL > 0:
            acc, tail = warpgroup_mma_wait(0, deps=[acc, tail])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count - 1) % STAGES), count=1)
        chunks = _chunks(acc)
        if TAIL > 0:
            chunks = chunks + (tail,)
        for chunk in gl.static_range(len(chunks)):
            _store_chunk(HALF, chunk, outs, staging, chunks[chunk], bias, row, token, sizes)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "token_tiles", "out_tiles", "steps"])
def _hopper_matmul_kernel(
    weights,
    x_main,
    x_tail,
    out_main,
    out_tail,
    bias_O,  # or None
    num_rows,  # of weights
    token_tiles,
    out_tiles,
    steps,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SHARED: gl.constexpr,
    WEIGHTS_SHARED: gl.constexpr,
    OUT_SHARED: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    FETCHING: gl.constexpr,
):
    dtype: gl.constexpr = x_main.dtype
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    TAIL_ROWS: gl.constexpr = TAIL if TAIL > 0 else PART
    OUTPUTS: gl.constexpr = M if ACTIVATION is None else M // 2
    w_halves = gl.allocate_shared_memory(dtype, [2 * STAGES, M, BLOCK_K], SHARED)
    # the same bytes as a copy fills them
    if ACTIVATION is None:
        w_tiles = w_halves._reinterpret(dtype, [STAGES, 2 * M, BLOCK_K], WEIGHTS_SHARED)
    else:  # gates and ups in turn
        w_tiles = w_halves._reinterpret(dtype, [STAGES, M // 8, 2, 8, BLOCK_K], WEIGHTS_SHARED)
    main_buffers = gl.allocate_shared_memory(dtype, [STAGES, MAIN, BLOCK_K], SHARED)
    tail_buffers = main_buffers
    if TAIL > 0:
        tail_buffers = gl.allocate_shared_memory(dtype, [STAGES, TAIL, BLOCK_K], SHARED)
    main_staging = gl.allocate_shared_memory(dtype, [2 * COPIES, PART, OUTPUTS], OUT_SHARED)
    tail_staging = main_staging._reinterpret(
        dtype, [2 * COPIES * (PART // TAIL_ROWS), TAIL_ROWS, OUTPUTS], OUT_SHARED
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    buffers = (w_halves, w_tiles, main_buffers, tail_buffers, main_staging, tail_staging)
    barriers = (ready, free)
    outs = (out_main, out_tail)
    bias = (bias_O, num_rows)
    schedule = (token_tiles, out_tiles, steps)
    sizes: gl.constexpr = (MAIN, TAIL, STAGES, COPIES, ACTIVATION)
    gl.warp_specialize(
        [
            (_multiply, (0, outs, buffers, barriers, bias, schedule, sizes)),
            (_multiply, (1, outs, buffers, barriers, bias, schedule, sizes)),
            (_fetch, (weights, x_main, x_tail, buffers, barriers, schedule, sizes)),
        ],
        [4, 1],
        [MULTIPLYING, FETCHING],
    )


def hopper_matmul(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    tiling: HopperTiling,
    tile: HopperTile | None = None,
) -> None:
    """out = x W^T + b, rounded once. All tensors are of one 16-bit dtype and contiguous; I and O
    are multiples of 8."""
    weights = boxes(weight_OI, BLOCK_OUT, BLOCK_IN)
    _launch(x_TI, weight_OI, weights, bias_O, out_TO, None, tiling, tile)


def hopper_gate_up(
    x_TI: Tensor,
    weight_2F_I: Tensor,
    out_TF: Tensor,
    activation: Activation,
    tiling: HopperTiling,
    tile: HopperTile | None = None,
) -> None:
    """act(gate) * up, else as `hopper_matmul`; the weight's first half are the gates. Rounded as by
    `act_mul` after a product: gate and up, act(gate), and the result."""
    num_gates, num_in = out_TF.shape[1], weight_2F_I.shape[1]
    weights = TensorDescriptor(
        weight_2F_I,
        [num_gates // INTERLEAVED, 2, INTERLEAVED, num_in],
        [INTERLEAVED * num_in, num_gates * num_in, num_in, 1],
        [BLOCK_OUT // (2 * INTERLEAVED), 2, INTERLEAVED, BLOCK_IN],
        WEIGHTS,
    )
    _launch(x_TI, weight_2F_I, weights, None, out_TF, activation, tiling, tile)


def _launch(
    x_TI: Tensor,
    weight_OI: Tensor,
    weights: TensorDescriptor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    activation: Activation | None,
    tiling: HopperTiling,
    tile: HopperTile | None,
) -> None:
    (num_tokens, num_in), num_rows = x_TI.shape, len(weight_OI)
    num_out, out_layout = (num_rows, SWIZZLED) if activation is None else (num_rows // 2, GATED)
    assert weight_OI.shape[1] == num_in and out_TO.shape == (num_tokens, num_out)
    assert x_TI.is_contiguous() and weight_OI.is_contiguous() and out_TO.is_contiguous()
    assert num_in % 8 == num_out % 8 == 0
    tile = tile or tiling.tile(num_tokens, num_rows)
    block_out = BLOCK_OUT // 2 * num_out // num_rows
    token_tiles, out_tiles = -(-num_tokens // tile.tokens), -(-num_rows // BLOCK_OUT)
    _hopper_matmul_kernel[(min(token_tiles * out_tiles, tiling.num_sms),)](
        weights,
        boxes(x_TI, tile.main, BLOCK_IN),
        boxes(x_TI, tile.tail or CHUNK, BLOCK_IN),
        boxes(out_TO, CHUNK, block_out, out_layout),
        boxes(out_TO, tile.tail or CHUNK, block_out, out_layout),
        bias_O,
        num_rows,
        token_tiles,
        out_tiles,
        -(-num_in // BLOCK_IN),
        MAIN=tile.main,
        TAIL=tile.tail,
        STAGES=tile.num_stages,
        COPIES=tile.copies,
        ACTIVATION=activation,
        SHARED=SWIZZLED,
        WEIGHTS_SHARED=weights.layout,
        OUT_SHARED=out_layout,
        MULTIPLYING=MULTIPLYING_REGISTERS,
        FETCHING=FETCHING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
