"""Decode attention's walk over a cache, of values as they are or quantized.

Quantized entries are taken by words of two, which is what instructions for matrices in shared
memory move: single bytes of values would be read one by one, since values are multiplied by
columns. The lower entries of all words are a matrix of every other dimension, the upper ones
another.

Shape legend: N positions of a tile, U units of a tile, K kv heads, M queries of an item, D head
width, P positions of a page, J = D / 2 words, S numbers of a head as they are taken: D or J.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.attention.prefill_attention import capped
from services.compute.kernels.kv.kv_entries import (
    decode_words,
    half_queries,
    load_scales,
    split_scales,
)


@triton.jit
def _dot(a, b, acc):
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def load_pages(pages, position, end, P: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Pages of a tile from this position on, which begins a unit: what lies in one page. Those
    beyond the end are 0."""
    at_U = position + UNIT * tl.arange(0, UNITS)
    return tl.load(pages + at_U // P, mask=at_U < end, other=0)


@triton.jit
def _over(value_U, UNIT: tl.constexpr, BLOCK_N: tl.constexpr):
    return value_U[:, None].broadcast_to([BLOCK_N // UNIT, UNIT]).reshape([BLOCK_N])


@triton.jit
def _places(
    page_U, position, STRIDE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where positions of a tile lie that have SIZE numbers each.

    As all of a unit have one page, its place is computed once: a tile of 32 positions in bfloat16
    takes 262 instructions, and 431 by position. Factors come after a reshape, behind which the
    compiler does not know of what numbers are multiples.
    """
    at_U = position + UNIT * tl.arange(0, BLOCK_N // UNIT)
    page_N = _over(page_U, UNIT, BLOCK_N).to(tl.int64)
    return page_N * STRIDE + (_over(at_U % P, UNIT, BLOCK_N) + tl.arange(0, BLOCK_N) % UNIT) * SIZE


@triton.jit
def _load_tile(
    keys, page_U, position, start, end, PAGE_STRIDE: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A tile's positions, which of them are real, its keys [N, S] and its values [S, N]."""
    s_S = tl.arange(0, BLOCK_S)
    position_N = position + tl.arange(0, BLOCK_N)
    # What lies beyond the context may be another sequence's NaN: it is not even loaded.
    real_N = (position_N - start).to(tl.uint32) < (end - start).to(tl.uint32)
    offset_N = _places(page_U, position, PAGE_STRIDE, SIZE, P, UNIT, BLOCK_N)
    offset_NS = offset_N[:, None] + s_S[None, :]
    mask_NS = real_N[:, None] & (s_S[None, :] < SIZE)
    k_NS = tl.load(keys + offset_NS, mask=mask_NS, other=0)
    offset_SN = K * P * SIZE + s_S[:, None] + offset_N[None, :]
    mask_SN = (s_S[:, None] < SIZE) & real_N[None, :]
    v_SN = tl.load(keys + offset_SN, mask=mask_SN, other=0)
    return position_N, real_N, k_NS, v_SN


@triton.jit
def _only_seen(score_NM, position_N, real_N, seen):
    """Scores of what each query sees: of all alike, or from and up to positions of its own. One
    that sees nothing of a tile has a number there, which later ones make nothing of."""
    if seen is None:
        score_NM = tl.where(real_N[:, None], score_NM, float("-inf"))
    else:
        from_M, to_M = seen
        seen_NM = (position_N[:, None] >= from_M[None, :]) & (position_N[:, None] < to_M[None, :])
        score_NM = tl.where(real_N[:, None] & seen_NM, score_NM, -1e30)
    return score_NM


@triton.jit
def attend_values(
    q_M, real_M, keys, pages, page_U, start, end, seen, scale_log2, cap_log2,
    PAGE_STRIDE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of these queries: the greatest scores, the weights' sums by position, and the mix."""
    BLOCK_M: tl.constexpr = q_M.shape[0]
    d_D = tl.arange(0, BLOCK_D)
    mask_DM = (d_D[:, None] < D) & real_M[None, :]
    q_DM = tl.load(q_M[None, :] + d_D[:, None], mask=mask_DM, other=0.0)
    dtype: tl.constexpr = q_M.dtype.element_ty
    if WIDEN:
        q_DM = q_DM.to(tl.float32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Sums stay apart by position until the end: one reduction across warps less in each turn.
    sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    mix_DM = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    for position in range(start - start % UNIT, end, BLOCK_N):
        position_N, real_N, k_ND, v_DN = _load_tile(
            keys, page_U, position, start, end, PAGE_STRIDE, K, D, P, BLOCK_D, BLOCK_N, UNIT
        )
        if WIDEN:
            k_ND = k_ND.to(tl.float32)
            v_DN = v_DN.to(tl.float32)
        score_NM = tl.dot(k_ND, q_DM, input_precision="ieee") * scale_log2
        if cap_log2 is not None:
            score_NM = capped(score_NM, cap_log2)
        score_NM = _only_seen(score_NM, position_N, real_N, seen)
        new_top_M = tl.maximum(top_M, tl.max(score_NM, axis=0))
        weight_NM = tl.exp2(score_NM - new_top_M[None, :])
        fade_M = tl.exp2(top_M - new_top_M)
        sum_NM = sum_NM * fade_M[None, :] + weight_NM
        mix_DM = mix_DM * fade_M[None, :]
        weight_NM = weight_NM.to(dtype).to(v_DN.dtype)
        mix_DM = tl.dot(v_DN, weight_NM, acc=mix_DM, input_precision="ieee")
        top_M = new_top_M
        page_U = load_pages(pages, position + BLOCK_N, end, P, UNIT, BLOCK_N // UNIT)
    return top_M, sum_NM, tl.trans(mix_DM)


@triton.jit
def attend_entries(
    q_M, real_M, words, scales, pages, page_U, start, end, seen, scale_log2, cap_log2,
    PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of these queries: the greatest scores, the weights' sums by position, and the mix.

    Entries are multiplied as float16, which has all of them, unless all is float32.
    """
    HALF: tl.constexpr = q_M.dtype.element_ty != tl.float32
    WIDE: tl.constexpr = WIDEN or not HALF
    weight_dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    NUM_WORDS: tl.constexpr = D // 2
    BLOCK_M: tl.constexpr = q_M.shape[0]
    j_J = tl.arange(0, BLOCK_D // 2)
    mask_JM = (j_J[:, None] < NUM_WORDS) & real_M[None, :]
    q_at_JM = q_M[None, :] + 2 * j_J[:, None]
    q_low_JM = tl.load(q_at_JM, mask=mask_JM, other=0.0)
    q_high_JM = tl.load(q_at_JM + 1, mask=mask_JM, other=0.0)
    if HALF:
        q_low_JM, _ = half_queries(q_low_JM, scale_log2, WIDEN)
        q_high_JM, scale_log2 = half_queries(q_high_JM, scale_log2, WIDEN)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    low_JM = tl.zeros([BLOCK_D // 2, BLOCK_M], tl.float32)
    high_JM = tl.zeros([BLOCK_D // 2, BLOCK_M], tl.float32)
    for position in range(start - start % UNIT, end, BLOCK_N):
        position_N, real_N, k_NJ, v_JN = _load_tile(
            words, page_U, position, start, end, PAGE_STRIDE, K, NUM_WORDS, P, BLOCK_D // 2,
            BLOCK_N, UNIT,
        )  # fmt: skip
        scale_at_N = _places(page_U, position, SCALE_STRIDE, 1, P, UNIT, BLOCK_N)
        k_scale_N, v_scale_N = load_scales(scales + scale_at_N, real_N)
        k_low_NJ, k_high_NJ = decode_words(k_NJ, ENTRY, WIDE, ASM)
        score_NM = _dot(k_high_NJ, q_high_JM, _dot(k_low_NJ, q_low_JM, None))
        score_NM = score_NM * (k_scale_N * scale_log2)[:, None]
        if cap_log2 is not None:
            score_NM = capped(score_NM, cap_log2)
        # Scales of values are in the weights, but the greatest weight is near 1 for any scales.
        number_N, log2_N, inverse_N = split_scales(v_scale_N)
        score_NM = _only_seen(score_NM + log2_N[:, None], position_N, real_N, seen)
        new_top_M = tl.maximum(top_M, tl.max(score_NM, axis=0))
        weight_NM = tl.exp2(score_NM - new_top_M[None, :])
        fade_M = tl.exp2(top_M - new_top_M)
        sum_NM = sum_NM * fade_M[None, :] + weight_NM * inverse_N[:, None]
        v_low_JN, v_high_JN = decode_words(v_JN, ENTRY, WIDE, ASM)
        weight_NM = (weight_NM * number_N[:, None]).to(weight_dtype).to(v_low_JN.dtype)
        low_JM = _dot(v_low_JN, weight_NM, low_JM * fade_M[None, :])
        high_JM = _dot(v_high_JN, weight_NM, high_JM * fade_M[None, :])
        top_M = new_top_M
        page_U = load_pages(pages, position + BLOCK_N, end, P, UNIT, BLOCK_N // UNIT)
    mix_MD = tl.join(tl.trans(low_JM), tl.trans(high_JM)).reshape(BLOCK_M, BLOCK_D)
    return top_M, sum_NM, mix_MD
