"""What a warpgroup of Hopper's decode attention over latents does with one block: with its own one,
and with one of the other warpgroup, which has made the weights.

`shared` is the queries' halves and rotated part, the blocks' halves and rotated parts, and what is
known of each head; `barriers` are those by which the kernel's parts wait for one another
(hopper_latent_decode).

Shape legend: M heads of a tile, N latents of a block, C columns of half a latent, P of the rotated
part.
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

from services.compute.kernels.mla.hopper_latent_fetch import BLOCK_N, clear_latents


@gluon.jit
def begin_scores(HALF: gl.constexpr, shared, barriers, phase, zeros_MN, zero):
    """Begin the scores of this warpgroup's block."""
    q_halves, q_turned, latents, turned, _ = shared
    own_ready, rest_ready, _, _, _, _ = barriers
    mbarrier.wait(own_ready.index(HALF), phase)
    c_CN = latents.index(3 * HALF + zero).permute([1, 0])
    score_MN = warpgroup_mma(
        q_halves.index(HALF + zero), c_CN, zeros_MN, use_acc=False, is_async=True
    )
    mbarrier.wait(rest_ready.index(HALF), phase)
    c_CN = latents.index(1 + HALF + zero).permute([1, 0])
    score_MN = warpgroup_mma(q_halves.index(1 - HALF + zero), c_CN, score_MN, is_async=True)
    k_PN = turned.index(HALF + zero).permute([1, 0])
    return warpgroup_mma(q_turned, k_PN, score_MN, is_async=True)


@gluon.jit
def weigh(score_MN, max_M, start, end, scale_log2, layout: gl.constexpr):
    """What a block's latents weigh, the new maxima, and what older weights are times."""
    if start + BLOCK_N > end:
        position_N = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        score_MN = gl.where((position_N < end)[None, :], score_MN, float("-inf"))
    new_max_M = gl.maximum(max_M, gl.max(score_MN, axis=1) * scale_log2)
    weight_MN = gl.exp2(gl.fma(score_MN, scale_log2, -new_max_M[:, None]))
    return weight_MN, new_max_M, gl.exp2(max_M - new_max_M)


@gluon.jit
def begin_others(
    HALF: gl.constexpr, shared, barriers, parts, phase, start, end, acc_MC, BOX: gl.constexpr,
    sums: gl.constexpr, scores: gl.constexpr, zero,
):  # fmt: skip
    """Begin this warpgroup's half of the other one's block, whose weights have been made."""
    _, _, latents, turned, stats = shared
    _, rest_ready, _, _, weighed, _ = barriers
    OTHER: gl.constexpr = 1 - HALF
    mbarrier.wait(rest_ready.index(OTHER), phase)
    mbarrier.wait(weighed.index(OTHER), phase)
    if (end < start + BLOCK_N) & (end % BOX != 0):
        clear_latents(parts, 1 + OTHER, start, end, BOX, latents.shape[2])
        fence_async_shared()
    max_M = stats.index(OTHER).load(gl.SliceLayout(1, scores))
    decay_M = stats.index(2 + OTHER).load(gl.SliceLayout(1, scores))
    acc_MC = acc_MC * gl.convert_layout(decay_M, gl.SliceLayout(1, sums))[:, None]
    acc_MC = warpgroup_mma(
        turned.index(OTHER + zero), latents.index(1 + OTHER + zero), acc_MC, is_async=True
    )
    return acc_MC, max_M, decay_M


@gluon.jit
def publish(HALF: gl.constexpr, shared, barriers, weight_MN, max_M, decay_M):
    """Give the other warpgroup the weights; they lie where the block's rotated parts were."""
    _, _, _, turned, stats = shared
    turned.index(HALF).store(weight_MN)
    stats.index(HALF).store(max_M)
    stats.index(2 + HALF).store(decay_M)
    fence_async_shared()
    mbarrier.arrive(barriers[4].index(HALF), count=1)


@gluon.jit
def multiply_own(
    HALF: gl.constexpr, shared, barriers, parts, start, end, weight_MN, decay_M, acc_MC,
    BOX: gl.constexpr, sums: gl.constexpr, zero,
):  # fmt: skip
    """This warpgroup's half of its own block."""
    latents = shared[2]
    own_free = barriers[2]
    if (end < start + BLOCK_N) & (end % BOX != 0):
        clear_latents(parts, 3 * HALF, start, end, BOX, latents.shape[2])
        fence_async_shared()
    acc_MC = acc_MC * gl.convert_layout(decay_M, gl.SliceLayout(1, sums))[:, None]
    weight_MN = gl.convert_layout(weight_MN, gl.DotOperandLayout(0, sums, 2))
    acc_MC = warpgroup_mma(weight_MN, latents.index(3 * HALF + zero), acc_MC, is_async=True)
    acc_MC, weight_MN = warpgroup_mma_wait(0, deps=[acc_MC, weight_MN])
    mbarrier.arrive(own_free.index(HALF), count=1)
    return acc_MC
