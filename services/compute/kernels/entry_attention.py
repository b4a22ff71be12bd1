"""Decode attention's walk over a quantized cache.

Entries are taken by words of two, which is what instructions for matrices in shared memory move:
single bytes of values would be read one by one, since values are multiplied by columns. The lower
entries of all words are a matrix of every other dimension, the upper ones another.

Shape legend: N positions of a tile, K kv heads, M queries of an item, D head width, P positions of
a page, J = D / 2 words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.kv_entries import (
    decode_words,
    half_queries,
    load_scales,
    split_scales,
)
from services.compute.kernels.prefill_attention import capped


@triton.jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def only_seen(score_MN, position_N, real_N, seen):
    """Scores of what each query sees: of all alike, or from and up to positions of its own. One
    that sees nothing of a tile has a number there, which later ones make nothing of."""
    if seen is None:
        score_MN = tl.where(real_N[None, :], score_MN, float("-inf"))
    else:
        from_M, to_M = seen
        seen_MN = (position_N[None, :] >= from_M[:, None]) & (position_N[None, :] < to_M[:, None])
        score_MN = tl.where(real_N[None, :] & seen_MN, score_MN, -1e30)
    return score_MN


@triton.jit
def attend_entries(
    q_M, real_M, words, scales, pages, page_N, start, end, seen, scale_log2, cap_log2,
    PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of these queries: the greatest scores, the weights' sums by column, and the mix.

    Entries are multiplied as float16, which has all of them, unless all is float32.
    """
    HALF: tl.constexpr = q_M.dtype.element_ty != tl.float32
    WIDE: tl.constexpr = WIDEN or not HALF
    weight_dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    NUM_WORDS: tl.constexpr = D // 2
    BLOCK_M: tl.constexpr = q_M.shape[0]
    j_J = tl.arange(0, BLOCK_D // 2)
    n_N = tl.arange(0, BLOCK_N)
    mask_MJ = real_M[:, None] & (j_J[None, :] < NUM_WORDS)
    q_at_MJ = q_M[:, None] + 2 * j_J[None, :]
    q_low_MJ = tl.load(q_at_MJ, mask=mask_MJ, other=0.0)
    q_high_MJ = tl.load(q_at_MJ + 1, mask=mask_MJ, other=0.0)
    if HALF:
        q_low_MJ, _ = half_queries(q_low_MJ, scale_log2, WIDEN)
        q_high_MJ, scale_log2 = half_queries(q_high_MJ, scale_log2, WIDEN)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    low_MJ = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    high_MJ = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    for position in range(start, end, BLOCK_N):
        position_N = position + n_N
        # What lies beyond the context may be another sequence's NaN: it is not even loaded.
        real_N = position_N < end
        offset_N = page_N.to(tl.int64) * PAGE_STRIDE + (position_N % P) * NUM_WORDS
        offset_NJ = offset_N[:, None] + j_J[None, :]
        mask_NJ = real_N[:, None] & (j_J[None, :] < NUM_WORDS)
        k_NJ = tl.load(words + offset_NJ, mask=mask_NJ, other=0)
        v_NJ = tl.load(words + K * P * NUM_WORDS + offset_NJ, mask=mask_NJ, other=0)
        scale_at_N = page_N.to(tl.int64) * SCALE_STRIDE + position_N % P
        k_scale_N, v_scale_N = load_scales(scales + scale_at_N, real_N)
        k_low_JN, k_high_JN = decode_words(tl.trans(k_NJ), ENTRY, WIDE, ASM)
        score_MN = _dot(q_high_MJ, k_high_JN, _dot(q_low_MJ, k_low_JN, None))
        score_MN = score_MN * (k_scale_N * scale_log2)[None, :]
        if cap_log2 is not None:
            score_MN = capped(score_MN, cap_log2)
        # Scales of values are in the weights, but the greatest weight is near 1 for any scales.
        number_N, log2_N, inverse_N = split_scales(v_scale_N)
        score_MN = only_seen(score_MN + log2_N[None, :], position_N, real_N, seen)
        new_top_M = tl.maximum(top_M, tl.max(score_MN, axis=1))
        weight_MN = tl.exp2(score_MN - new_top_M[:, None])
        fade_M = tl.exp2(top_M - new_top_M)
        sum_MN = sum_MN * fade_M[:, None] + weight_MN * inverse_N[None, :]
        v_low_NJ, v_high_NJ = decode_words(v_NJ, ENTRY, WIDE, ASM)
        weight_MN = (weight_MN * number_N[None, :]).to(weight_dtype).to(v_low_NJ.dtype)
        low_MJ = _dot(weight_MN, v_low_NJ, low_MJ * fade_M[:, None])
        high_MJ = _dot(weight_MN, v_high_NJ, high_MJ * fade_M[:, None])
        top_M = new_top_M
        next_N = position_N + BLOCK_N
        page_N = tl.load(pages + next_N // P, mask=next_N < end, other=0)
    return top_M, sum_MN, tl.join(low_MJ, high_MJ).reshape(BLOCK_M, BLOCK_D)
