"""Norm of latents, rotation of their rotated part, and the write into the cache in one launch.

What the input of latent attention makes of a token is a row: its queries, or the latent that they
are made of, then its own latent and the rotated part of its key. A queries' latent is normalised by
a program of its own. Rotation is in float32 with one rounding at its end, norms round as those of
add_norm do.

Shape legend: T tokens, C columns of a row, Q columns before the latent, R of the latent, P of the
rotated part, J = P / 2 pairs, W = R + P, N pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.kv.kv_entries import Codes, encode, head_scales, scale_values
from services.compute.kernels.kv.kv_format import (
    LayerFormat,
    LayerPages,
    quantize_latents,
)
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rows.add_norm import (
    apply_weight,
    norm_form,
    norm_reference,
    normalize,
)
from services.compute.kernels.rows.rotate_and_store import RotaryTables

if TYPE_CHECKING:
    from services.compute.layers.weighted_layers import Norm

ROW_ELEMENTS = 512
"""Of a warp: 16 a thread, two loads of 16 bytes in bf16."""


class LatentNorms(NamedTuple):
    """RMS norms of the latent, and of that of the queries if they are made of one."""

    latent: Norm
    query: Norm | None


@triton.jit
def _scale(first, second, LARGEST: tl.constexpr):
    """Of what has two halves, by its bits."""
    first = first.to(tl.float32)[None, :]
    return tl.max(head_scales(first, second.to(tl.float32)[None, :], LARGEST), axis=0)


@triton.jit
def _encoded(x, scale, ENTRY: tl.constexpr):
    return encode(x.to(tl.float32) * tl.math.div_rn(1.0, scale_values(scale)), ENTRY)


@triton.jit
def _store_latents_kernel(
    down_ptr,
    q_ptr,  # or None
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    norm_ptr,
    pages_ptr,
    scales_ptr,  # or None
    q_eps,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    Q_FORM: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    Q: tl.constexpr = C - R - P
    J: tl.constexpr = P // 2
    token = tl.program_id(0).to(tl.int64)
    row = down_ptr + token * C
    dtype = down_ptr.dtype.element_ty
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if tl.program_id(1) == 1:
        if q_ptr is not None:
            q = tl.arange(0, BLOCK_Q)
            weight_q = tl.load(q_norm_ptr + q, mask=q < Q, other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            x_q = tl.load(row + q, mask=q < Q, other=0.0).to(tl.float32)
            normal_q = normalize(x_q, q < Q, q_eps, Q, Q_FORM)
            out_q = apply_weight(normal_q, weight_q, None, Q_FORM, dtype)
            tl.store(q_ptr + token * Q + q, out_q, mask=q < Q)
    else:
        r = tl.arange(0, BLOCK_R)
        j = tl.arange(0, BLOCK_J)
        weight = tl.load(norm_ptr + r, mask=r < R, other=0.0)
        cos = tl.load(cos_ptr + position * J + j, mask=j < J, other=0.0)
        sin = tl.load(sin_ptr + position * J + j, mask=j < J, other=0.0)
        if PDL:
            # In this order, so that the next kernel finds done what was launched before this one.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(row + Q + r, mask=r < R, other=0.0).to(tl.float32)
        first = tl.load(row + Q + R + j, mask=j < J, other=0.0).to(tl.float32)
        second = tl.load(row + Q + R + J + j, mask=j < J, other=0.0).to(tl.float32)
        normal = normalize(x, r < R, eps, R, FORM)
        entry = pages_ptr + (slot // PAGE) * PAGE_STRIDE + (slot % PAGE) * (R + P)
        stored = slot >= 0
        latent = apply_weight(normal, weight, None, FORM, dtype)
        turned = (first * cos - second * sin).to(dtype)
        other = (second * cos + first * sin).to(dtype)
        if scales_ptr is not None:
            # zeros beyond the columns, which the weights or the angles leave there
            scale = _scale(latent, latent, LARGEST)
            turned_scale = _scale(turned, other, LARGEST)
            scale_at = scales_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
            scale_at += 2 * ((slot // PAGE) * SCALE_STRIDE + slot % PAGE)
            tl.store(scale_at, scale.to(tl.int16), mask=stored)
            tl.store(scale_at + 1, turned_scale.to(tl.int16), mask=stored)
            latent_code = _encoded(latent, scale, ENTRY)
            turned_code = _encoded(turned, turned_scale, ENTRY)
            other_code = _encoded(other, turned_scale, ENTRY)
            tl.store(entry + r, latent_code, mask=stored & (r < R))
            tl.store(entry + R + j, turned_code, mask=stored & (j < J))
            tl.store(entry + R + J + j, other_code, mask=stored & (j < J))
        else:
            tl.store(entry + r, latent, mask=stored & (r < R))
            tl.store(entry + R + j, turned, mask=stored & (j < J))
            tl.store(entry + R + J + j, other, mask=stored & (j < J))


def store_latents(
    down_TC: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    tables: RotaryTables,
    norms: LatentNorms,
    pages: Tensor,
    q_TQ: Tensor | None,
    *,
    scales: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Store normalised latents and rotated parts in the cache; `q_TQ` gets the queries' latents
    after their norm, where there is one.

    `pages` are one layer's part [N, 1, 1, page, W] of pages, with scales [N, 2, 1, page] if entries
    have 8 bits. As in rotate_and_store, token t turns
    by positions_T[t] and goes to kv_slots_T[t]; a slot of -1 stores nothing, but needs a position
    within the tables; with pdl positions and slots are read above the wait, and the next kernel may
    start when those before this one have ended.
    """
    num_tokens, num_columns = down_TC.shape
    page_tokens, width = pages.shape[3:]
    rank = norms.latent.weight_E.numel()
    rotated = width - rank
    num_queries = num_columns - width
    codes = Codes.of(LayerPages(pages, scales))
    widest = max(rank, num_queries if q_TQ is not None else 0)
    _store_latents_kernel[(num_tokens, 1 if q_TQ is None else 2)](
        down_TC,
        q_TQ,
        positions_T,
        kv_slots_T,
        tables.cos_PJ,
        tables.sin_PJ,
        None if norms.query is None else norms.query.weight_E,
        norms.latent.weight_E,
        codes.pages,
        codes.scales,
        None if norms.query is None else norms.query.eps,
        norms.latent.eps,
        C=num_columns,
        R=rank,
        P=rotated,
        PAGE=page_tokens,
        PAGE_STRIDE=codes.page_stride,
        SCALE_STRIDE=codes.scale_stride,
        ENTRY=codes.entry,
        LARGEST=codes.largest,
        BLOCK_Q=triton.next_power_of_2(num_queries),
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_J=triton.next_power_of_2(rotated // 2),
        Q_FORM=norm_form(norms.query),
        FORM=norm_form(norms.latent),
        num_warps=min(max(triton.next_power_of_2(widest) // ROW_ELEMENTS, 1), 8),
        **dependent_launch(pdl, down_TC),
    )


def store_latents_reference(
    down_TC: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    tables: RotaryTables,
    norms: LatentNorms,
    pages: Tensor,
    q_TQ: Tensor | None,
    scales: Tensor | None = None,
) -> None:
    num_tokens, num_columns = down_TC.shape
    page_tokens, width = pages.shape[3:]
    rank = norms.latent.weight_E.numel()
    sizes = (num_columns - width, rank, width - rank)
    query_TQ, latent_TR, turning_TP = down_TC.split(sizes, dim=1)
    if q_TQ is not None and norms.query is not None:
        q_TQ.copy_(norm_reference(query_TQ, norms.query))
    kept = (
        norm_reference(latent_TR, norms.latent),
        turned(turning_TP, positions_T[:num_tokens], tables),
    )
    stored = (kv_slots_T[:num_tokens] >= 0).nonzero().flatten()
    slots = kv_slots_T[:num_tokens][stored]
    entries = torch.cat(kept, dim=1)
    numbers, offsets = slots // page_tokens, slots % page_tokens
    if scales is None:
        pages[numbers, 0, 0, offsets] = entries[stored]
    else:
        form = LayerFormat(1, page_tokens, width, down_TC.dtype, pages.dtype, rank)
        made, its_scales = quantize_latents(entries, form)
        pages.view(torch.uint8)[numbers, 0, 0, offsets] = made.view(torch.uint8)[stored]
        scales[numbers, :, 0, offsets] = its_scales[stored]


def turned(x: Tensor, positions_T: Tensor, tables: RotaryTables) -> Tensor:
    """[T, ..., P] rotated by halves, rounded once."""
    shape = (len(positions_T), *[1] * (x.dim() - 2), -1)
    cos, sin = (table[positions_T.long()].view(shape) for table in tables)
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
