"""Decode attention's walk over a quantized cache.

Entries are taken by words of two, which is what instructions for matrices in shared memory move:
single bytes of values would be read one by one, since values are multiplied by columns. The lower
entries of all words are a matrix of every other dimension, the upper ones another.

Shape legend: N positions of a tile, K kv heads, G query heads of a kv head, D head width, P
positions of a page, J = D / 2 words.
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
def attend_entries(
    q_row, words, scales, pages, page_N, start, end, scale_log2, cap_log2,
    PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of one head's queries: the greatest scores, the weights' sums by column, and the mix.

    Entries are multiplied as float16, which has all of them, unless all is float32.
    """
    HALF: tl.constexpr = q_row.dtype.element_ty != tl.float32
    WIDE: tl.constexpr = WIDEN or not HALF
    weight_dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    NUM_WORDS: tl.constexpr = D // 2
    g_G = tl.arange(0, BLOCK_G)
    j_J = tl.arange(0, BLOCK_D // 2)
    n_N = tl.arange(0, BLOCK_N)
    mask_GJ = (g_G[:, None] < G) & (j_J[None, :] < NUM_WORDS)
    q_at_GJ = q_row + g_G[:, None] * D + 2 * j_J[None, :]
    q_low_GJ = tl.load(q_at_GJ, mask=mask_GJ, other=0.0)
    q_high_GJ = tl.load(q_at_GJ + 1, mask=mask_GJ, other=0.0)
    if HALF:
        q_low_GJ, _ = half_queries(q_low_GJ, scale_log2, WIDEN)
        q_high_GJ, scale_log2 = half_queries(q_high_GJ, scale_log2, WIDEN)

    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    sum_GN = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    low_GJ = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
    high_GJ = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
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
        score_GN = _dot(q_high_GJ, k_high_JN, _dot(q_low_GJ, k_low_JN, None))
        score_GN = score_GN * (k_scale_N * scale_log2)[None, :]
        if cap_log2 is not None:
            score_GN = capped(score_GN, cap_log2)
        # Scales of values are in the weights, but the greatest weight is near 1 for any scales.
        number_N, log2_N, inverse_N = split_scales(v_scale_N)
        score_GN = tl.where(real_N[None, :], score_GN + log2_N[None, :], float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(score_GN, axis=1))
        weight_GN = tl.exp2(score_GN - new_top_G[:, None])
        fade_G = tl.exp2(top_G - new_top_G)
        sum_GN = sum_GN * fade_G[:, None] + weight_GN * inverse_N[None, :]
        v_low_NJ, v_high_NJ = decode_words(v_NJ, ENTRY, WIDE, ASM)
        weight_GN = (weight_GN * number_N[None, :]).to(weight_dtype).to(v_low_NJ.dtype)
        low_GJ = _dot(weight_GN, v_low_NJ, low_GJ * fade_G[:, None])
        high_GJ = _dot(weight_GN, v_high_NJ, high_GJ * fade_G[:, None])
        top_G = new_top_G
        next_N = position_N + BLOCK_N
        page_N = tl.load(pages + next_N // P, mask=next_N < end, other=0)
    return top_G, sum_GN, tl.join(low_GJ, high_GJ).reshape(BLOCK_G, BLOCK_D)
