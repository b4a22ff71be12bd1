"""Paged attention of chunks of prompts over latents, after prefill_attention, whose plan it shares.

A tile is some queries of a chunk with their heads. A query's result depends on itself and its
sequence alone, bit for bit: blocks begin at multiples of BLOCK_N, and one in which a query sees
nothing changes none of its sums.

Over latents a pair of query and position takes three times the products that it takes over keys and
values. So what a chunk sees of itself, which is there to be expanded, is left to latent_prefill.py
where that is allowed to round otherwise, and this does the context before it.

Shape legend: T tokens, H heads, M rows of a tile, R width of a latent, W of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.decode_plan import padded
from services.compute.kernels.kv_entries import Codes
from services.compute.kernels.kv_format import LayerPages
from services.compute.kernels.latent_attention import (
    attend_latents,
    latent_constants,
    load_queries,
)
from services.compute.kernels.latent_tiling import LatentTiling
from services.compute.kernels.prefill_attention import LOG2_E
from services.compute.kernels.prefill_plan import PrefillWork, load_tile, num_items_bound
from services.compute.kernels.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    AttentionCall,
    StepInputs,
)

CHUNK_ROWS = 64
"""Rows of a tile, queries times heads: their sums take half of a multiprocessor's registers."""


@triton.jit
def _mark_kernel(
    counts,
    q_start_R,
    q_len_R,
    token_start_R,
    sums_TH,
    H: tl.constexpr,
    ROWS_AT: tl.constexpr,
    DECODE_ROWS_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(counts + ROWS_AT):
        sees_context = (tl.load(q_start_R + row) > 0) | (row < tl.load(counts + DECODE_ROWS_AT))
        mark = tl.where(sees_context, 0.0, float("-inf"))
        first = tl.load(token_start_R + row).to(tl.int64) * H
        size = tl.load(q_len_R + row) * H
        stride = tl.num_programs(1) * BLOCK
        for begin in range(tl.program_id(1) * BLOCK, size, stride):
            at = begin + tl.arange(0, BLOCK)
            tl.store(sums_TH + first + at, mark + at * 0.0, mask=at < size)


MARK_BLOCK, MARK_PROGRAMS = 1024, 16
"""A row of 8,192 tokens and 16 heads is eight turns of each program."""


def mark_contexts(inputs: StepInputs, sums_TH: Tensor, num_tokens: int) -> None:
    """Say by minus infinity which tokens of a step have nothing before their chunks: those of rows
    that begin their text. Results of other rows overwrite theirs, layer by layer."""
    _mark_kernel[(min(len(inputs.row_slot_R), num_tokens), MARK_PROGRAMS)](
        inputs.counts,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        sums_TH,
        H=sums_TH.shape[1],
        ROWS_AT=NUM_ROWS,
        DECODE_ROWS_AT=NUM_DECODE_ROWS,
        BLOCK=MARK_BLOCK,
        num_warps=4,
    )


@triton.jit
def _chunk_kernel(
    q_THW,
    latent_pages,
    scales,  # or None
    page_table,
    row_slot_R,
    q_start_R,
    q_len_R,
    token_start_R,
    items_I2,
    num_items_ptr,
    out_THR,
    sums_TH,  # or None
    scale_log2,
    Q_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    TILES: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    ITEM_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    CONTEXT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tiles in turn, those of the longest contexts first."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    SPLITS: tl.constexpr = (ITEM_Q + BLOCK_Q - 1) // BLOCK_Q
    m_M = tl.arange(0, BLOCK_M)
    r_R = tl.arange(0, BLOCK_R)
    num_tiles = tl.load(num_items_ptr) * (TILES * SPLITS)
    for place in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        item = place // (TILES * SPLITS)
        split = place % (TILES * SPLITS) // TILES
        row, first, num_q = load_tile(items_I2, q_len_R, item, split, ITEM_Q, BLOCK_Q)
        start = tl.load(q_start_R + row)
        pages = page_table + tl.load(row_slot_R + row).to(tl.int64) * TABLE_ROW
        query_M = m_M // G
        valid_M = query_M < num_q
        token_M = (tl.load(token_start_R + row) + first + query_M).to(tl.int64)
        head_M = place % TILES * G + m_M % G
        end = start + first + num_q
        if CONTEXT:
            end = start
        end = tl.where(num_q > 0, end, 0)  # no block for a tile without queries
        seen_M = valid_M & (end > 0)
        q_M = q_THW + token_M[:, None] * Q_ROW + head_M[:, None] * (R + P)
        q_MR, q_MP, q_scale = load_queries(
            q_M, seen_M, scale_log2, R, P, BLOCK_R, BLOCK_P, ENTRY, WIDEN
        )
        top_M, sum_MN, mix_MR = attend_latents(
            q_MR, q_MP, start + first + query_M, latent_pages, scales, pages, 0, end, q_scale,
            q_THW.dtype.element_ty, R, P, PAGE, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM,
            BLOCK_M, BLOCK_R, BLOCK_P, BLOCK_N, ROW_WARPS, not CONTEXT, WIDEN,
        )  # fmt: skip
        sum_M = tl.where(seen_M, tl.sum(sum_MN, axis=1), 1.0)
        result_MR = (mix_MR / sum_M[:, None]).to(out_THR.dtype.element_ty)
        out_M = out_THR + token_M[:, None] * OUT_ROW + head_M[:, None] * R
        tl.store(out_M + r_R[None, :], result_MR, mask=seen_M[:, None] & (r_R[None, :] < R))
        if CONTEXT:
            sums_M = sums_TH + token_M * (TILES * G) + head_M
            tl.store(sums_M, top_M + tl.log2(sum_M), mask=valid_M)


def latent_chunk_attention(
    call: AttentionCall,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    tiling: LatentTiling | None = None,
) -> None:
    """Attention of every query that `plan_prefill` has put into `work`, over latents.

    `call` is as in latent_decode_attention. `num_tokens` is the bucket; `tiling` is there to
    measure others than the chosen one.
    """
    _attend(call, inputs, work, num_tokens, None, tiling)


def latent_context_attention(
    call: AttentionCall,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    sums_TH: Tensor,
    tiling: LatentTiling | None = None,
) -> None:
    """The same to what lies before the queries' own chunks alone.

    `sums_TH` (float32) gets the logarithms, to base 2, of the sums of exponentials that results
    were divided by.
    """
    _attend(call, inputs, work, num_tokens, sums_TH, tiling)


def _attend(
    call: AttentionCall,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    sums_TH: Tensor | None,
    tiling: LatentTiling | None,
) -> None:
    q_THW, pages, page_table_NL, out_THR, scale = call[:5]
    tiles = q_THW.shape[1] // work.group
    block_m = max(CHUNK_ROWS, padded(work.group))
    tiling = tiling or LatentTiling.of(q_THW.dtype, block_m, call.kv_scales is not None)
    codes = Codes.of(LayerPages(pages, call.kv_scales))
    splits = triton.cdiv(work.block_q, block_m // work.group)
    num_items = num_items_bound(num_tokens, work.max_rows, work.block_q)
    _chunk_kernel[(min(num_items * splits * tiles, work.num_sms),)](
        q_THW,
        codes.pages,
        codes.scales,
        page_table_NL,
        inputs.row_slot_R,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        work.items_I2,
        work.num_items,
        out_THR,
        sums_TH,
        scale * LOG2_E,
        TILES=tiles,
        G=work.group,
        ITEM_Q=work.block_q,
        BLOCK_M=block_m,
        CONTEXT=sums_TH is not None,
        **latent_constants(call, codes, tiling),
    )
