"""Paged attention over latents: all heads of a token meet the same entries, which are keys by all
of their columns and values by those of the latent.

A tile is the heads of one query, or of some queries of a chunk (latent_chunks.py), so that an entry
is read once for all of them; of many heads there are several tiles (latent_tiling.py). Decode rows
are split over the context as decode_plan's list says; latent_merge.py merges those that were cut.
Queries come absorbed, and results are mixes of latents (latent_heads.py).

Shape legend: T tokens, H heads, M rows of a tile, N positions of a block, R width of a latent, P of
the rotated part, W = R + P, I items.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from services.compute.kernels.attention.decode_plan import DecodeWork, load_item, padded
from services.compute.kernels.attention.prefill_attention import LOG2_E
from services.compute.kernels.kv.kv_entries import (
    Codes,
    decode,
    half_queries,
    load_scales,
    split_scales,
)
from services.compute.kernels.kv.kv_format import LayerPages, dequantize
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.mla.latent_merge import merge_rows
from services.compute.kernels.mla.latent_tiling import LatentTiling, head_tiles
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs


@triton.jit
def load_columns(pointers, real_N, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of entries; what is masked reads as 0, whatever lies there."""
    if BLOCK == WIDTH:
        return tl.load(pointers, mask=real_N[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=real_N[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_queries(
    q_M, valid_M, scale_log2, R: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, ENTRY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The two parts of the queries whose addresses are [M, 1], and the scale of their scores."""
    r_R = tl.arange(0, BLOCK_R)
    p_P = tl.arange(0, BLOCK_P)
    q_MR = load_columns(q_M + r_R[None, :], valid_M, r_R, R, BLOCK_R)
    q_MP = load_columns(q_M + R + p_P[None, :], valid_M, p_P, P, BLOCK_P)
    if ENTRY is not None and q_MR.dtype != tl.float32:
        q_MR, _ = half_queries(q_MR, scale_log2, WIDEN)
        q_MP, scale_log2 = half_queries(q_MP, scale_log2, WIDEN)
    elif WIDEN:
        q_MR = q_MR.to(tl.float32)
        q_MP = q_MP.to(tl.float32)
    return q_MR, q_MP, scale_log2


@triton.jit
def load_page_ids(
    pages, position, end, PAGE: tl.constexpr, PAGES: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Of the block at this position, one for each of its PAGES."""
    if not IS_ALIGNED:
        position = position // PAGE * PAGE
    ids = ()
    for place in tl.static_range(PAGES):
        here = position + place * PAGE
        ids = ids + (tl.load(pages + here // PAGE, mask=here < end, other=0),)  # type: ignore[assignment]
    return ids


@triton.jit
def entry_offsets(
    ids, at_N, PAGES: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Of positions that are counted from the first page of `ids`."""
    at_N = at_N.to(tl.uint32)  # is divided by shifts alone
    offset_N = at_N.to(tl.int64) * 0 + ids[0].to(tl.int64) * PAGE_STRIDE
    for place in tl.static_range(1, PAGES):
        here = ids[place].to(tl.int64) * PAGE_STRIDE
        offset_N = tl.where(at_N // PAGE == place, here, offset_N)
    return offset_N + (at_N % PAGE).to(tl.int32) * STRIDE


@triton.jit
def attend_latents(
    q_MR, q_MP, position_M, entries, scales, pages, start, end, scale_log2, dtype: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_WARPS: tl.constexpr, CAUSAL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of the queries: the greatest scores, the weights' sums by column, and the mix. A CAUSAL one
    sees up to its position, others all from `start` to `end`.

    Entries of 8 bits are multiplied as float16, which has all of them, unless all is float32.
    """
    WIDE: tl.constexpr = WIDEN or dtype == tl.float32
    HALF: tl.constexpr = ENTRY is not None and dtype != tl.float32
    weight_dtype: tl.constexpr = tl.float16 if HALF else dtype
    r_R = tl.arange(0, BLOCK_R)
    p_P = tl.arange(0, BLOCK_P)
    IS_ALIGNED: tl.constexpr = BLOCK_N % PAGE == 0  # then blocks begin with a page
    PAGES: tl.constexpr = BLOCK_N // PAGE if IS_ALIGNED else (BLOCK_N + PAGE - 2) // PAGE + 1
    # What one warp copies are positions in turn: few pages, and rows at distances that are known.
    n_N = tl.arange(0, BLOCK_N).to(tl.uint32)
    n_N = (n_N % ROW_WARPS * (BLOCK_N // ROW_WARPS) + n_N // ROW_WARPS).to(tl.int32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Sums stay apart by column until the end: one reduction across warps less in each turn.
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    mix_MR = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    # Page ids are one block ahead, in registers: were they loaded where they are used, Triton would
    # give half of its pipeline's depth to them.
    ids = load_page_ids(pages, start, end, PAGE, PAGES, IS_ALIGNED)
    for position in range(start, end, BLOCK_N):
        position_N = position + n_N
        # What lies beyond the context may be another sequence's NaN: it is not even loaded.
        real_N = position_N < end
        at_N = n_N if IS_ALIGNED else position % PAGE + n_N
        offset_N = entry_offsets(ids, at_N, PAGES, PAGE, PAGE_STRIDE, R + P)
        entry_N = entries + offset_N[:, None]
        c_NR = load_columns(entry_N + r_R[None, :], real_N, r_R, R, BLOCK_R)
        k_NP = load_columns(entry_N + R + p_P[None, :], real_N, p_P, P, BLOCK_P)
        if ENTRY is not None:
            c_NR = decode(c_NR, ENTRY, WIDE, ASM)
            k_NP = decode(k_NP, ENTRY, WIDE, ASM)
        elif WIDEN:
            c_NR = c_NR.to(tl.float32)
            k_NP = k_NP.to(tl.float32)
        score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
        if ENTRY is not None:
            scale_at_N = entry_offsets(ids, at_N, PAGES, PAGE, SCALE_STRIDE, 1)
            c_scale_N, k_scale_N = load_scales(scales + scale_at_N, real_N)
            # Scales of values are in the weights, but the greatest weight is near 1 for any scales.
            number_N, log2_N, inverse_N = split_scales(c_scale_N)
            score_MN = tl.fma(score_MN, (k_scale_N * scale_log2)[None, :], log2_N[None, :])
            of_latent_MN = tl.dot(q_MR, tl.trans(c_NR), input_precision="ieee")
            score_MN = tl.fma(of_latent_MN, (c_scale_N * scale_log2)[None, :], score_MN)
        else:
            score_MN = tl.dot(q_MR, tl.trans(c_NR), acc=score_MN, input_precision="ieee")
            score_MN = score_MN * scale_log2
        seen_MN = real_N[None, :]
        if CAUSAL:
            seen_MN = seen_MN & (position_N[None, :] <= position_M[:, None])
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(score_MN, axis=1))
        weight_MN = tl.exp2(score_MN - new_top_M[:, None])
        fade_M = tl.exp2(top_M - new_top_M)
        if ENTRY is not None:
            sum_MN = sum_MN * fade_M[:, None] + weight_MN * inverse_N[None, :]
            weight_MN = weight_MN * number_N[None, :]
        else:
            sum_MN = sum_MN * fade_M[:, None] + weight_MN
        mix_MR = mix_MR * fade_M[:, None]
        weight_MN = weight_MN.to(weight_dtype).to(c_NR.dtype)
        mix_MR = tl.dot(weight_MN, c_NR, acc=mix_MR, input_precision="ieee")
        top_M = new_top_M
        ids = load_page_ids(pages, position + BLOCK_N, end, PAGE, PAGES, IS_ALIGNED)
    return top_M, sum_MN, mix_MR


@triton.jit
def _decode_kernel(
    q_THW,
    latent_pages,
    scales,  # or None
    page_table,
    items,
    num_items,
    partial,  # [I, H, R]
    partial_stats,  # [2, I, H]
    out_THR,
    scale_log2,
    Q_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)  # fastest: all tiles of a query read the same entries
    item = tl.program_id(1)
    count = tl.load(num_items, volatile=True)
    row, slot, chunk, size, length, first = load_item(items, item)
    if PDL:
        # In this order, so that the next kernel finds done what was launched before this one.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if item >= count:
        return
    g_G = tl.arange(0, BLOCK_G)
    r_R = tl.arange(0, BLOCK_R)
    head_G = tile * G + g_G
    q_G = q_THW + row.to(tl.int64) * Q_ROW + head_G[:, None] * (R + P)
    q_GR, q_GP, scale_log2 = load_queries(
        q_G, g_G < G, scale_log2, R, P, BLOCK_R, BLOCK_P, ENTRY, WIDEN
    )
    pages = page_table + slot.to(tl.int64) * TABLE_ROW
    start = chunk * size
    end = tl.minimum(start + size, length)
    top_G, sum_GN, mix_GR = attend_latents(
        q_GR, q_GP, None, latent_pages, scales, pages, start, end, scale_log2,
        q_THW.dtype.element_ty, R, P, PAGE, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM,
        BLOCK_G, BLOCK_R, BLOCK_P, BLOCK_N, ROW_WARPS, False, WIDEN,
    )  # fmt: skip
    sum_G = tl.sum(sum_GN, axis=1)
    mask_GR = (g_G[:, None] < G) & (r_R[None, :] < R)
    if length <= size:
        result_GR = (mix_GR / sum_G[:, None]).to(out_THR.dtype.element_ty)
        out_G = out_THR + row.to(tl.int64) * OUT_ROW + head_G[:, None] * R
        tl.store(out_G + r_R[None, :], result_GR, mask=mask_GR)
    else:
        stat_G = (first + chunk) * H + head_G
        tl.store(partial + stat_G.to(tl.int64)[:, None] * R + r_R[None, :], mix_GR, mask=mask_GR)
        tl.store(partial_stats + stat_G, top_G, mask=g_G < G)
        tl.store(partial_stats + MAX_ITEMS * H + stat_G, sum_G, mask=g_G < G)


def latent_constants(call: AttentionCall, codes: Codes, tiling: LatentTiling) -> dict[str, Any]:
    """What launches over latents have in common."""
    rank, rotated = call.out_THD.shape[2], call.q_THD.shape[2] - call.out_THD.shape[2]
    return {
        "Q_ROW": call.q_THD.stride(0),
        "OUT_ROW": call.out_THD.stride(0),
        "TABLE_ROW": call.page_table_NL.stride(0),
        "PAGE_STRIDE": codes.page_stride,
        "SCALE_STRIDE": codes.scale_stride,
        "ENTRY": codes.entry,
        "ASM": codes.has_instructions,
        "R": rank,
        "P": rotated,
        "PAGE": call.kv_pages.shape[3],
        "BLOCK_R": padded(rank),
        "BLOCK_P": padded(rotated),
        "BLOCK_N": tiling.block_n,
        "ROW_WARPS": min(max(1, tiling.num_warps * 256 // padded(rank)), tiling.block_n),
        "WIDEN": call.q_THD.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def latent_decode_attention(
    call: AttentionCall,
    work: DecodeWork,
    num_rows: int,
    *,
    tiling: LatentTiling | None = None,
    pdl: bool = False,
) -> None:
    """Attention of the step's decode rows, which `plan_decode` has put into `work`.

    Of `call` queries are [T, H, W], pages [Y, 1, 1, page, W], and out [T, H, R]; scales, if entries
    have 8 bits, are [Y, 2, 1, page], of the latent and of the rotated part. There is no window and
    no cap. Rows that are no decode rows are neither read nor written. A row's result depends on
    itself and on the length of its chunks. `tiling` is there to measure others than the chosen one.

    With pdl the plan is read above the wait: the launch before must be that of absorb_queries, or
    one without pdl.
    """
    q_THW, pages, page_table_NL, out_THR, scale = call[:5]
    num_heads, rank = out_THR.shape[1:]
    tiles = head_tiles(num_heads)
    group = num_heads // tiles
    tiling = tiling or LatentTiling.of(q_THW.dtype, group, call.kv_scales is not None)
    launch = dependent_launch(pdl, q_THW)
    codes = Codes.of(LayerPages(pages, call.kv_scales))
    _decode_kernel[(tiles, work.item_limit(num_rows))](
        q_THW,
        codes.pages,
        codes.scales,
        page_table_NL,
        work.items,
        work.num_items,
        work.partial_IKMD,
        work.partial_stats,
        out_THR,
        scale * LOG2_E,
        MAX_ITEMS=len(work.items),
        H=num_heads,
        G=group,
        BLOCK_G=padded(group),
        **latent_constants(call, codes, tiling),
        **launch,
    )
    merge_rows(call, work, num_rows, pdl=pdl)


def latent_attention_reference(call: AttentionCall, inputs: StepInputs, rows: range) -> None:
    """Of these rows, in float64."""
    q_THW, pages, page_table_NL, out_THR, scale = call[:5]
    page_tokens, rank = pages.shape[3], out_THR.shape[2]
    for row in rows:
        first, start = int(inputs.token_start_R[row]), int(inputs.q_start_R[row])
        num_q = int(inputs.q_len_R[row])
        end = start + num_q
        of_row = page_table_NL[int(inputs.row_slot_R[row])][: -(-end // page_tokens)]
        scales = None if call.kv_scales is None else call.kv_scales[of_row.long()]
        layer = LayerPages(pages[of_row.long()], scales)
        entries_LW = dequantize(layer, torch.float64, rank)[:, 0, 0].flatten(0, 1)[:end]
        scores = torch.einsum("qhw,lw->qhl", q_THW[first : first + num_q].double(), entries_LW)
        hidden_QL = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
        scores = (scores * scale).masked_fill(hidden_QL[:, None].to(scores.device), -torch.inf)
        mixed = torch.einsum("qhl,lr->qhr", scores.softmax(-1), entries_LW[:, :rank])
        out_THR[first : first + num_q] = mixed.to(out_THR.dtype)
