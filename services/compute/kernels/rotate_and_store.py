"""Head norms, rotary embedding (Su et al., 2021) and the write into the KV cache in one launch.

A program has some heads of one token, whatever they are: queries are rotated where they lie, keys
are rotated on their way into the cache, values go there as they are. Rotation is in float32 with
one rounding at its end; the head norm of Qwen3 before it rounds as add_rms_norm does.

Shape legend: T tokens, C columns of qkv, H query heads, K kv heads, D head width, N pages,
P positions (of the tables; in the kernel PAGE is the positions of a page), J = D / 2 pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rms_norm import rms_norm
from services.compute.kernels.step_buffers import StepInputs

TILE_PAIRS = 1024
"""Pairs of a program: in bf16 two 16-byte loads by each thread of four warps."""


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    pages_ptr,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    J: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    pair_in = (j < J)[None, :]
    inside = (head < H + 2 * K)[:, None] & pair_in
    first_ptrs = qkv_ptr + token * ((H + 2 * K) * D) + head[:, None] * D + j[None, :]
    dtype = qkv_ptr.dtype.element_ty
    if not PDL:  # before the angles, which wait for the position
        first_in = tl.load(first_ptrs, mask=inside, other=0.0)
        second_in = tl.load(first_ptrs + J, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + position * J + j[None, :], mask=pair_in, other=0.0)
    sin = tl.load(sin_ptr + position * J + j[None, :], mask=pair_in, other=0.0)
    # all loads stand before the first sum, so that they are waited for together
    if Q_NORM:
        first_q = tl.load(q_norm_ptr + j[None, :], mask=pair_in, other=0.0).to(tl.float32)
        second_q = tl.load(q_norm_ptr + J + j[None, :], mask=pair_in, other=0.0).to(tl.float32)
    if K_NORM:
        first_k = tl.load(k_norm_ptr + j[None, :], mask=pair_in, other=0.0).to(tl.float32)
        second_k = tl.load(k_norm_ptr + J + j[None, :], mask=pair_in, other=0.0).to(tl.float32)
    if PDL:
        # In this order, so that the next kernel finds done what was launched before this one.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        first_in = tl.load(first_ptrs, mask=inside, other=0.0)
        second_in = tl.load(first_ptrs + J, mask=inside, other=0.0)
    first = first_in.to(tl.float32)
    second = second_in.to(tl.float32)

    if Q_NORM or K_NORM:
        mean = tl.sum(first * first + second * second, axis=1) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        first_normal = (first * scale).to(dtype).to(tl.float32)
        second_normal = (second * scale).to(dtype).to(tl.float32)
        if Q_NORM:
            is_query = (head < H)[:, None]
            first = tl.where(is_query, (first_normal * first_q).to(dtype).to(tl.float32), first)
            second = tl.where(is_query, (second_normal * second_q).to(dtype).to(tl.float32), second)
        if K_NORM:
            is_key = ((head >= H) & (head < H + K))[:, None]
            first = tl.where(is_key, (first_normal * first_k).to(dtype).to(tl.float32), first)
            second = tl.where(is_key, (second_normal * second_k).to(dtype).to(tl.float32), second)

    first_out = (first * cos - second * sin).to(dtype)
    second_out = (second * cos + first * sin).to(dtype)
    in_place = inside & (head < H)[:, None]
    tl.store(first_ptrs, first_out, mask=in_place)
    tl.store(first_ptrs + J, second_out, mask=in_place)

    # a page holds K heads of keys, then K heads of values: in the order in which qkv has them
    is_value = (head >= H + K)[:, None]
    cache_row = ((slot // PAGE) * (2 * K) + (head - H)) * PAGE + slot % PAGE
    cache_ptrs = pages_ptr + cache_row[:, None] * D + j[None, :]
    stored = inside & (head >= H)[:, None] & (slot >= 0)
    tl.store(cache_ptrs, tl.where(is_value, first_in, first_out), mask=stored)
    tl.store(cache_ptrs + J, tl.where(is_value, second_in, second_out), mask=stored)


def rotate_and_store(
    qkv_TC: Tensor,
    inputs: StepInputs,
    cos_PD: Tensor,
    sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    kv_pages: Tensor,
    num_heads: int,
    *,
    pdl: bool = False,
) -> None:
    """Norm (where given) and rotate q in place; store k, normed and rotated, and v in the cache.

    qkv_TC is [T, (H + 2K) * D], the tables are float32 [P, D / 2], kv_pages is [N, 2, K, page, D]
    of qkv's dtype, all contiguous. Token t turns by positions_T[t] and is stored at kv_slots_T[t];
    a slot of -1 stores nothing, but needs a position within the tables. Queries are not scaled.
    The keys in qkv stay as they were. With pdl positions and slots are read above the wait (see
    dependent_launch), and the next kernel may start when those before this one have ended.
    """
    _, _, kv_heads, page_tokens, width = kv_pages.shape
    num_all = num_heads + 2 * kv_heads
    block_j = triton.next_power_of_2(width // 2)
    block_n = min(max(TILE_PAIRS // block_j, 1), triton.next_power_of_2(num_all))
    _rotate_and_store_kernel[(qkv_TC.shape[0], triton.cdiv(num_all, block_n))](
        qkv_TC,
        inputs.positions_T,
        inputs.kv_slots_T,
        cos_PD,
        sin_PD,
        qkv_TC if q_norm_D is None else q_norm_D,
        qkv_TC if k_norm_D is None else k_norm_D,
        kv_pages,
        eps,
        H=num_heads,
        K=kv_heads,
        D=width,
        PAGE=page_tokens,
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        Q_NORM=q_norm_D is not None,
        K_NORM=k_norm_D is not None,
        num_warps=4,
        **dependent_launch(pdl, qkv_TC),
    )


def rotate_and_store_reference(
    qkv_TC: Tensor,
    inputs: StepInputs,
    cos_PD: Tensor,
    sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    kv_pages: Tensor,
    num_heads: int,
) -> None:
    num_tokens = qkv_TC.shape[0]
    _, _, kv_heads, page_tokens, width = kv_pages.shape
    heads = qkv_TC.view(num_tokens, num_heads + 2 * kv_heads, width)
    q_THD, k_TKD, v_TKD = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    positions_T = inputs.positions_T[:num_tokens].long()
    cos_T1J, sin_T1J = cos_PD[positions_T].unsqueeze(1), sin_PD[positions_T].unsqueeze(1)
    if q_norm_D is not None:
        q_THD.copy_(rms_norm(q_THD, q_norm_D, eps))
    if k_norm_D is not None:
        k_TKD = rms_norm(k_TKD, k_norm_D, eps)
    q_THD.copy_(_rotate(q_THD, cos_T1J, sin_T1J))
    k_TKD = _rotate(k_TKD, cos_T1J, sin_T1J)
    stored = (inputs.kv_slots_T[:num_tokens] >= 0).nonzero().flatten()
    slots = inputs.kv_slots_T[:num_tokens][stored]
    pages, offsets = slots // page_tokens, slots % page_tokens
    kv_pages[pages, 0, :, offsets] = k_TKD[stored]
    kv_pages[pages, 1, :, offsets] = v_TKD[stored]


def _rotate(x_TND: Tensor, cos_T1J: Tensor, sin_T1J: Tensor) -> Tensor:
    wide = x_TND.to(torch.promote_types(x_TND.dtype, cos_T1J.dtype))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_T1J - second * sin_T1J, second * cos_T1J + first * sin_T1J), dim=-1
    )
    return rotated.to(x_TND.dtype)
