"""Paged attention of chunks of prompts over latents, after prefill_attention, whose plan it shares.

A tile is some queries of a chunk with their heads. A query's result depends on itself and its
sequence alone, bit for bit: blocks begin at multiples of BLOCK_N, and one in which a query sees
nothing changes none of its sums.

Over latents a pair of query and position takes three times the products that it takes over keys and
values. So this does the chunks for which making these does not pay (latent_expansion.py), and all
where decode rows and chunks are to have one arithmetic.

Shape legend: T tokens, H heads, M rows of a tile, R width of a latent, W of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.attention.decode_plan import padded
from services.compute.kernels.attention.prefill_attention import LOG2_E
from services.compute.kernels.attention.prefill_plan import PrefillWork, load_tile, num_items_bound
from services.compute.kernels.kv.kv_entries import Codes
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.mla.latent_attention import (
    attend_latents,
    latent_constants,
    load_queries,
)
from services.compute.kernels.mla.latent_tiling import LatentTiling
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs

CHUNK_ROWS = 64
"""Rows of a tile, queries times heads: their sums take half of a multiprocessor's registers."""


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
        end = tl.where(num_q > 0, start + first + num_q, 0)  # no block for a tile without queries
        q_M = q_THW + token_M[:, None] * Q_ROW + head_M[:, None] * (R + P)
        q_MR, q_MP, q_scale = load_queries(
            q_M, valid_M, scale_log2, R, P, BLOCK_R, BLOCK_P, ENTRY, WIDEN
        )
        top_M, sum_MN, mix_MR = attend_latents(
            q_MR, q_MP, start + first + query_M, latent_pages, scales, pages, 0, end, q_scale,
            q_THW.dtype.element_ty, R, P, PAGE, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM,
            BLOCK_M, BLOCK_R, BLOCK_P, BLOCK_N, ROW_WARPS, True, WIDEN,
        )  # fmt: skip
        sum_M = tl.where(valid_M, tl.sum(sum_MN, axis=1), 1.0)
        result_MR = (mix_MR / sum_M[:, None]).to(out_THR.dtype.element_ty)
        out_M = out_THR + token_M[:, None] * OUT_ROW + head_M[:, None] * R
        tl.store(out_M + r_R[None, :], result_MR, mask=valid_M[:, None] & (r_R[None, :] < R))


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
        scale * LOG2_E,
        TILES=tiles,
        G=work.group,
        ITEM_Q=work.block_q,
        BLOCK_M=block_m,
        **latent_constants(call, codes, tiling),
    )
