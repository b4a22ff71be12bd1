"""Head norms, rotary embedding (Su et al., 2021) and the write into the KV cache in one launch.

A program has some heads of one token, whatever they are: queries are rotated where they lie, keys
are rotated on their way into the cache, values go there as they are. Rotation is in float32 with
one rounding at its end; norms round as those of add_norm do. Layers without rotation have no
tables, but their queries may have a factor by position; where nothing happens to queries no program
has them.

Shape legend: T tokens, C columns of qkv, H query heads, K kv heads, D head width, N pages,
P positions (of the tables; in the kernel PAGE is the positions of a page), J = D / 2 pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.kv.kv_entries import Codes, encode, head_scales, scale_values
from services.compute.kernels.kv.kv_format import LayerPages, quantize
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rows.add_norm import norm_form, norm_reference

if TYPE_CHECKING:
    from services.compute.layers.weighted_layers import Norm


TILE_PAIRS = 1024
"""Pairs of a program: in bf16 two 16-byte loads by each thread of four warps."""

THREAD_PAIRS = 16
"""Pairs of a thread at most, where one program has all heads of a token."""


class RotaryTables(NamedTuple):
    """By position, float32: half-split rotation turns pair j, which is (j, j + D / 2)."""

    cos_PJ: Tensor
    sin_PJ: Tensor


class HeadNorms(NamedTuple):
    """Norms of queries and of keys, of one form and without bias.

    A weight is of one head, or of all of them one after the other (Cohere).
    """

    q: Norm | None
    k: Norm | None
    after_rotation: bool = False  # Hunyuan
    over_all_heads: bool = False  # one RMS norm of a token's queries, one of its keys (OLMo 2)


@triton.jit
def _load_pair(pointers, mask, J: tl.constexpr):
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + J, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _weigh(first, second, normal, weights, here, FORM: tl.constexpr, dtype: tl.constexpr):
    """Where `here`, the normalised pair times its weights, rounded; elsewhere what there was."""
    first_normal, second_normal = normal
    first_weight, second_weight = weights
    if FORM[1]:
        first_normal = first_normal.to(dtype).to(tl.float32)
        second_normal = second_normal.to(dtype).to(tl.float32)
    first = tl.where(here, (first_normal * first_weight).to(dtype).to(tl.float32), first)
    second = tl.where(here, (second_normal * second_weight).to(dtype).to(tl.float32), second)
    return first, second


@triton.jit
def _norm_heads(
    first,
    second,
    head,
    pair_in,
    q_weights,
    k_weights,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    FORM: tl.constexpr,
    OVER_ALL: tl.constexpr,
    dtype: tl.constexpr,
):
    """Queries and keys over their root mean square, times their weights; None: as they are."""
    if FORM[0] == "layer":
        mean = (tl.sum(first + second, axis=1) / D)[:, None]
        first_centred = tl.where(pair_in, first - mean, 0.0)
        second_centred = tl.where(pair_in, second - mean, 0.0)
    else:
        first_centred = first
        second_centred = second
    squares = first_centred * first_centred + second_centred * second_centred
    if OVER_ALL:
        is_query = head < H
        of_head = tl.sum(squares, axis=1)
        of_queries = tl.sum(tl.where(is_query, of_head, 0.0), axis=0) / (H * D)
        is_key = (head >= H) & (head < H + K)
        of_keys = tl.sum(tl.where(is_key, of_head, 0.0), axis=0) / (K * D)
        scale = tl.rsqrt(tl.where(is_query, of_queries, of_keys) + eps)[:, None]
    else:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    normal = (first_centred * scale, second_centred * scale)
    if q_weights is not None:
        first, second = _weigh(first, second, normal, q_weights, (head < H)[:, None], FORM, dtype)
    if k_weights is not None:
        is_key = ((head >= H) & (head < H + K))[:, None]
        first, second = _weigh(first, second, normal, k_weights, is_key, FORM, dtype)
    return first, second


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    factor_ptr,
    q_norm_ptr,
    k_norm_ptr,
    pages_ptr,
    scales_ptr,
    eps,
    FIRST_HEAD: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    FORM: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    AFTER: tl.constexpr,
    OVER_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    J: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = FIRST_HEAD + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    if (cos_ptr is not None) or (factor_ptr is not None):
        position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    pair_in = (j < J)[None, :]
    inside = (head < H + 2 * K)[:, None] & pair_in
    first_ptrs = qkv_ptr + token * ((H + 2 * K) * D) + head[:, None] * D + j[None, :]
    dtype = qkv_ptr.dtype.element_ty
    if not PDL:  # before the angles, which wait for the position
        first_in = tl.load(first_ptrs, mask=inside, other=0.0)
        second_in = tl.load(first_ptrs + J, mask=inside, other=0.0)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + position * J + j[None, :], mask=pair_in, other=0.0)
        sin = tl.load(sin_ptr + position * J + j[None, :], mask=pair_in, other=0.0)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + position)
    # all loads stand before the first sum, so that they are waited for together
    q_weights = None
    if q_norm_ptr is not None:
        if WEIGHT_STRIDE == 0:
            q_weights = _load_pair(q_norm_ptr + j[None, :], pair_in, J)
        else:
            q_ptrs = q_norm_ptr + head[:, None] * WEIGHT_STRIDE + j[None, :]
            q_weights = _load_pair(q_ptrs, pair_in & (head < H)[:, None], J)
    k_weights = None
    if k_norm_ptr is not None:
        if WEIGHT_STRIDE == 0:
            k_weights = _load_pair(k_norm_ptr + j[None, :], pair_in, J)
        else:
            k_ptrs = k_norm_ptr + (head - H)[:, None] * WEIGHT_STRIDE + j[None, :]
            is_key = (head >= H) & (head < H + K)
            k_weights = _load_pair(k_ptrs, pair_in & is_key[:, None], J)
    if PDL:
        # In this order, so that the next kernel finds done what was launched before this one.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        first_in = tl.load(first_ptrs, mask=inside, other=0.0)
        second_in = tl.load(first_ptrs + J, mask=inside, other=0.0)
    first = first_in.to(tl.float32)
    second = second_in.to(tl.float32)

    if FORM is not None and not AFTER:
        first, second = _norm_heads(
            first, second, head, pair_in, q_weights, k_weights, eps,
            H, K, D, FORM, OVER_ALL, dtype,
        )  # fmt: skip
    if cos_ptr is not None:
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if FORM is not None and AFTER:
        first, second = _norm_heads(
            first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32), head, pair_in,
            q_weights, k_weights, eps, H, K, D, FORM, OVER_ALL, dtype,
        )  # fmt: skip
    if factor_ptr is not None:
        of_head = tl.where(head < H, factor, 1.0)[:, None]
        first = first * of_head
        second = second * of_head
    first_out = first.to(dtype)
    second_out = second.to(dtype)
    if FIRST_HEAD == 0:
        in_place = inside & (head < H)[:, None]
        tl.store(first_ptrs, first_out, mask=in_place)
        tl.store(first_ptrs + J, second_out, mask=in_place)

    # a page holds K heads of keys, then K heads of values: in the order in which qkv has them
    is_value = (head >= H + K)[:, None]
    place = (slot // PAGE) * PAGE_STRIDE + ((head - H) * PAGE + slot % PAGE) * D
    cache_ptrs = pages_ptr + place[:, None] + j[None, :]
    stored = inside & (head >= H)[:, None] & (slot >= 0)
    first_kept = tl.where(is_value, first_in, first_out)
    second_kept = tl.where(is_value, second_in, second_out)
    if scales_ptr is None:
        tl.store(cache_ptrs, first_kept, mask=stored)
        tl.store(cache_ptrs + J, second_kept, mask=stored)
    elif FIRST_HEAD + (tl.program_id(1) + 1) * BLOCK_N > H:  # not where all heads are queries
        first = first_kept.to(tl.float32)
        second = second_kept.to(tl.float32)
        scale = head_scales(first, second, LARGEST)
        inverse = tl.math.div_rn(1.0, scale_values(scale))[:, None]
        tl.store(cache_ptrs, encode(first * inverse, ENTRY), mask=stored)
        tl.store(cache_ptrs + J, encode(second * inverse, ENTRY), mask=stored)
        place = (slot // PAGE) * SCALE_STRIDE + ((head - H) % K) * PAGE + slot % PAGE
        halves_ptr = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        half = tl.where(head < H + K, 0, 1)
        has_scale = (head >= H) & (head < H + 2 * K) & (slot >= 0)
        tl.store(halves_ptr + 2 * place + half, scale.to(tl.int16), mask=has_scale)


def rotate_and_store(
    qkv_TC: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    tables: RotaryTables | None,
    norms: HeadNorms | None,
    kv_pages: Tensor,
    num_heads: int,
    *,
    query_factors_P: Tensor | None = None,
    kv_scales: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Norm and rotate (where given) q in place; store k, normed and rotated, and v in the cache.

    qkv_TC is [T, (H + 2K) * D], the tables are float32 [P, D / 2]; kv_pages is one layer's part
    [N, 2, K, page, D] of pages of qkv's dtype, each of which is contiguous, or, with kv_scales, of
    quantized ones (see kv_format), into which goes what would have been stored. Token t turns by
    positions_T[t] and is stored at kv_slots_T[t], which are those of the layer's cache group; a
    slot of -1 stores nothing, but needs a position within the tables. Queries are not scaled,
    but by query_factors_P (float32) at their positions if there are any. The keys in qkv stay as
    they were. With pdl positions and slots are read above the wait (see dependent_launch), and the
    next kernel may start when those before this one have ended.
    """
    _, _, kv_heads, page_tokens, width = kv_pages.shape
    q_norm, k_norm, after_rotation, over_all_heads = norms or HeadNorms(None, None)
    one = q_norm or k_norm
    are_queries_as_they_were = tables is None and q_norm is None and query_factors_P is None
    first_head = num_heads if are_queries_as_they_were else 0
    num_all = num_heads + 2 * kv_heads - first_head
    codes = Codes.of(LayerPages(kv_pages, kv_scales))
    block_j = triton.next_power_of_2(width // 2)
    block_n = min(max(TILE_PAIRS // block_j, 1), triton.next_power_of_2(num_all))
    num_warps = 4
    if over_all_heads:
        block_n = triton.next_power_of_2(num_all)
        num_warps = min(16, max(4, block_n * block_j // (32 * THREAD_PAIRS)))
    _rotate_and_store_kernel[(qkv_TC.shape[0], triton.cdiv(num_all, block_n))](
        qkv_TC,
        positions_T,
        kv_slots_T,
        None if tables is None else tables.cos_PJ,
        None if tables is None else tables.sin_PJ,
        query_factors_P,
        None if q_norm is None else q_norm.weight_E,
        None if k_norm is None else k_norm.weight_E,
        codes.pages,
        codes.scales,
        None if one is None else one.eps,
        FIRST_HEAD=first_head,
        H=num_heads,
        K=kv_heads,
        D=width,
        PAGE=page_tokens,
        PAGE_STRIDE=codes.page_stride,
        SCALE_STRIDE=codes.scale_stride,
        ENTRY=codes.entry,
        LARGEST=codes.largest,
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        FORM=norm_form(one),
        WEIGHT_STRIDE=0 if one is None or one.weight_E.numel() == width else width,
        AFTER=after_rotation,
        OVER_ALL=over_all_heads,
        num_warps=num_warps,
        **dependent_launch(pdl, qkv_TC),
    )


def rotate_and_store_reference(
    qkv_TC: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    tables: RotaryTables | None,
    norms: HeadNorms | None,
    kv_pages: Tensor,
    num_heads: int,
    *,
    query_factors_P: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    num_tokens = qkv_TC.shape[0]
    _, _, kv_heads, page_tokens, width = kv_pages.shape
    heads = qkv_TC.view(num_tokens, num_heads + 2 * kv_heads, width)
    q_THD, k_TKD, v_TKD = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    norms = norms or HeadNorms(None, None)
    q, k = q_THD, k_TKD
    if not norms.after_rotation:
        q, k = _norm_reference(q, norms.q, norms), _norm_reference(k, norms.k, norms)
    if tables is not None:
        positions_T = positions_T[:num_tokens].long()
        cos_T1J, sin_T1J = (table[positions_T].unsqueeze(1) for table in tables)
        q, k = _rotate(q, cos_T1J, sin_T1J), _rotate(k, cos_T1J, sin_T1J)
    if norms.after_rotation:
        q, k = _norm_reference(q, norms.q, norms), _norm_reference(k, norms.k, norms)
    if query_factors_P is not None:
        q = q * query_factors_P[positions_T[:num_tokens].long(), None, None]
    q_THD.copy_(q)
    stored = (kv_slots_T[:num_tokens] >= 0).nonzero().flatten()
    slots = kv_slots_T[:num_tokens][stored]
    pages, offsets = slots // page_tokens, slots % page_tokens
    kept = torch.stack((k[stored], v_TKD[stored]), dim=1)
    if kv_scales is not None:
        kept, scales = quantize(kept, kv_pages.dtype)
        kv_scales[pages, :, :, offsets] = scales
        kv_pages, kept = kv_pages.view(torch.uint8), kept.view(torch.uint8)
    kv_pages[pages, :, :, offsets] = kept


def _norm_reference(x_TND: Tensor, norm: Norm | None, norms: HeadNorms) -> Tensor:
    if norm is None:
        return x_TND
    if norms.over_all_heads:
        return norm_reference(x_TND.flatten(1), norm).view(x_TND.shape)
    weight = norm.weight_E.view(-1, x_TND.shape[-1])  # of one head, or of each
    return norm_reference(x_TND, replace(norm, weight_E=weight))


def _rotate(x_TND: Tensor, cos_T1J: Tensor, sin_T1J: Tensor) -> Tensor:
    wide = x_TND.to(torch.promote_types(x_TND.dtype, cos_T1J.dtype))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_T1J - second * sin_T1J, second * cos_T1J + first * sin_T1J), dim=-1
    )
    return rotated.to(x_TND.dtype)
