"""The loop of Hopper's attention kernels, after FlashAttention-3 (Shah et al., 2024): what a
warpgroup does with a tile's blocks of keys and values, which a warp beside it fetches.

A block's scores are weighed while the tensor cores multiply the values of the block before.

Shape legend: M rows of a warpgroup (queries times heads of a group), N keys of a block, D width of
a head's values, P positions of a page.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from services.compute.kernels.attention.hopper_fetch import (
    HALF_ROWS,
    PANEL,
    clear_values,
    first_seen,
)


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Of keys and of values: which blocks are there, and which both warpgroups are done with."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    return keys_ready, keys_free, values_ready, values_free


@gluon.jit
def _weigh(
    score_MN,
    max_M,
    sum_M,
    position_M,
    start,
    first_position,
    window,
    scale_log2,
    cap_log2,
    TILE_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WINDOWED: gl.constexpr,
    STEP: gl.constexpr,
    layout: gl.constexpr,
):
    """What a block's keys weigh, the new maxima and sums, and what the old weights are times.

    The arithmetic of prefill_attention; a block's mask changes which scores there are, not how
    they are computed.
    """
    CAPPED: gl.constexpr = cap_log2 is not None  # scores are to base 2
    if CAPPED:
        capped_MN = 1.0 / (1.0 + gl.exp2(score_MN * scale_log2))
        score_MN = gl.fma(capped_MN, -2.0 * cap_log2, cap_log2)
    is_masked = start + BLOCK_N > first_position + 1
    if WINDOWED:
        last_first = first_seen(first_position + TILE_Q - 1, window, WINDOWED, STEP)
        is_masked = is_masked | (start < last_first)
    if is_masked:
        position_N = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        seen_MN = position_N[None, :] <= position_M[:, None]
        if WINDOWED:
            first_M = first_seen(position_M, window, WINDOWED, STEP)
            seen_MN = seen_MN & (position_N[None, :] >= first_M[:, None])
        score_MN = gl.where(seen_MN, score_MN, float("-inf"))
    new_max_M = gl.max(score_MN, axis=1)
    if not CAPPED:
        new_max_M = new_max_M * scale_log2
    new_max_M = gl.maximum(max_M, new_max_M)
    shift_M = new_max_M
    if WINDOWED:  # queries that have seen nothing yet stay at zero sums
        shift_M = gl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    if CAPPED:
        weight_MN = gl.exp2(score_MN - shift_M[:, None])
    else:
        weight_MN = gl.exp2(gl.fma(score_MN, scale_log2, -shift_M[:, None]))
    decay_M = gl.exp2(max_M - shift_M)
    sum_M = gl.fma(sum_M, decay_M, gl.sum(weight_MN, axis=1))
    return weight_MN, new_max_M, sum_M, decay_M


@gluon.jit
def _score(q_MD, q_MP, key_blocks, turned_blocks, stage, BLOCK_N: gl.constexpr):
    """Ask for the products of queries and a block's keys, both of one part or of two."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros_MN = gl.zeros([HALF_ROWS, BLOCK_N], gl.float32, layout=layout)
    k_DN = key_blocks.index(stage).permute([1, 0])
    score_MN = warpgroup_mma(q_MD, k_DN, zeros_MN, use_acc=False, is_async=True)
    if turned_blocks is not None:
        k_PN = turned_blocks.index(stage).permute([1, 0])
        score_MN = warpgroup_mma(q_MP, k_PN, score_MN, is_async=True)
    return score_MN


@gluon.jit
def attend_blocks(
    q_MD,
    q_MP,  # or None
    blocks,
    barriers,
    block,
    low,
    high,
    first_position,
    position_M,
    scales,
    sizes: gl.constexpr,
):
    """Take in a tile's blocks, of which the first is number `block` of the program's, but for the
    last one's values: sums of values, weights of these, maxima, sums, and the last's number."""
    key_blocks, turned_blocks, value_blocks, value_parts = blocks
    keys_ready, keys_free, values_ready, values_free = barriers
    window, scale_log2, cap_log2 = scales
    TILE_Q, P, BLOCK_N, STAGES, WINDOWED, STEP = sizes
    D: gl.constexpr = value_blocks.shape[2]
    dtype: gl.constexpr = value_blocks.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    begin = low // BLOCK_N * BLOCK_N
    max_M = gl.full([HALF_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
    sum_M = gl.zeros([HALF_ROWS], gl.float32, layout=gl.SliceLayout(1, scores))
    acc_MD = gl.zeros([HALF_ROWS, D], gl.float32, layout=sums)
    stage = block % STAGES
    phase = block // STAGES & 1
    mbarrier.wait(keys_ready.index(stage), phase)
    score_MN = _score(q_MD, q_MP, key_blocks, turned_blocks, stage, BLOCK_N)
    score_MN = warpgroup_mma_wait(0, deps=[score_MN])
    mbarrier.arrive(keys_free.index(stage), count=1)
    weight_MN, max_M, sum_M, _ = _weigh(
        score_MN, max_M, sum_M, position_M, begin, first_position, window, scale_log2, cap_log2,
        TILE_Q, BLOCK_N, WINDOWED, STEP, scores,
    )  # fmt: skip
    weight_MN = gl.convert_layout(weight_MN.to(dtype), weights)
    for start in range(begin + BLOCK_N, high, BLOCK_N):
        block += 1
        next_stage = block % STAGES
        next_phase = block // STAGES & 1
        mbarrier.wait(keys_ready.index(next_stage), next_phase)
        score_MN = _score(q_MD, q_MP, key_blocks, turned_blocks, next_stage, BLOCK_N)
        mbarrier.wait(values_ready.index(stage), phase)
        if WINDOWED:
            if start - BLOCK_N < low:
                clear_values(value_parts, stage, low, low, high, P, BLOCK_N, D // PANEL)
                fence_async_shared()
        acc_MD = warpgroup_mma(weight_MN, value_blocks.index(stage), acc_MD, is_async=True)
        score_MN = warpgroup_mma_wait(1, deps=[score_MN])
        mbarrier.arrive(keys_free.index(next_stage), count=1)
        new_MN, max_M, sum_M, decay_M = _weigh(
            score_MN, max_M, sum_M, position_M, start, first_position, window, scale_log2,
            cap_log2, TILE_Q, BLOCK_N, WINDOWED, STEP, scores,
        )  # fmt: skip
        acc_MD, weight_MN = warpgroup_mma_wait(0, deps=[acc_MD, weight_MN])
        mbarrier.arrive(values_free.index(stage), count=1)
        acc_MD = acc_MD * gl.convert_layout(decay_M, gl.SliceLayout(1, sums))[:, None]
        weight_MN = gl.convert_layout(new_MN.to(dtype), weights)
        stage = next_stage
        phase = next_phase
    return acc_MD, weight_MN, max_M, sum_M, block


@gluon.jit
def attend_last_values(acc_MD, weight_MN, blocks, barriers, block, low, high, sizes: gl.constexpr):
    """Take in the values of a tile's last block."""
    _, _, value_blocks, value_parts = blocks
    _, _, values_ready, values_free = barriers
    _, P, BLOCK_N, STAGES, WINDOWED, _ = sizes
    PANELS: gl.constexpr = value_blocks.shape[2] // PANEL
    stage = block % STAGES
    mbarrier.wait(values_ready.index(stage), block // STAGES & 1)
    if WINDOWED:
        if (high - 1) // BLOCK_N * BLOCK_N < low:
            clear_values(value_parts, stage, low, low, high, P, BLOCK_N, PANELS)
    if high % P != 0:
        clear_values(value_parts, stage, high, low, high, P, BLOCK_N, PANELS)
    fence_async_shared()
    acc_MD = warpgroup_mma(weight_MN, value_blocks.index(stage), acc_MD, is_async=True)
    acc_MD = warpgroup_mma_wait(0, deps=[acc_MD])
    mbarrier.arrive(values_free.index(stage), count=1)
    return acc_MD
