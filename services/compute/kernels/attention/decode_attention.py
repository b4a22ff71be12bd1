"""Paged attention for one query a row: split over the context as decode_plan's list says.

All query heads of a kv head share a tile, and rows of one slot with drafts do, so that keys and
values are read once. In products queries are columns, of which tensor cores take eight, where rows
would be sixteen. A row among others of its length is one item and is written at once; a long
one is several, and whichever of them finishes last merges all (the split-KV scheme of
Flash-Decoding, with the merge of stream-K).

Shape legend: T tokens, R rows, I items, N positions of a tile, H query heads, K kv heads, G query
heads of a kv head, M queries of an item by its rows and their heads, D head width, P positions of a
page, S chunks merged at once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from services.compute.kernels.attention.decode_plan import (
    ITEM_WORDS,
    NUM_ROWS,
    DecodeTiling,
    DecodeWork,
    load_item,
    padded,
)
from services.compute.kernels.attention.decode_walk import attend_entries, attend_values, load_pages
from services.compute.kernels.attention.prefill_attention import (
    attend_reference,
    score_scale,
    sink_weight,
)
from services.compute.kernels.kv.kv_entries import Codes
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.step.first_seen import step_begin, window_and_step
from services.compute.kernels.step.span import FULL
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, AttentionCall, StepInputs

MAX_MERGE_CHUNKS = 64

LEAST_COLUMNS = 8  # of a product

MIN_ENTRIES = 32
"""Of a padded head: half of them are words, of which tensor cores take 16 at least."""

MOST_REGISTERS = 200
"""Of each of 64 threads where rows may be together: about what rows alone have. Of both as many
programs fit a multiprocessor, and with fewer registers they are slower: 168, which leave room for
two more, make 64 rows of 420 take 33.8 µs instead of 31.3."""

EARLY_WIDTH = 129
"""From heads of this width on, the attention of one row lets the next kernel start with it: it
waits for memory more than it reads, and the products behind it ask for their weights meanwhile."""


@triton.jit
def _merge(
    partial, partial_stats, sinks, out, out_row, begins, count, head, MAX_ITEMS: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write what the chunks of a row have left, `count` from `begins` on."""
    g_G = tl.arange(0, BLOCK_G)
    s_S = tl.arange(0, BLOCK_S)
    d_D = tl.arange(0, BLOCK_D)
    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    sum_G = tl.zeros([BLOCK_G], tl.float32)
    mix_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for begin in range(0, count, BLOCK_S):
        s_ok = begin + s_S < count
        stat_SG = ((begins + begin + s_S)[:, None] * K + head) * QUERIES + g_G[None, :]
        mask_SG = s_ok[:, None] & (g_G[None, :] < G)
        # Read past the first-level cache, which knows nothing of other programs' writes.
        top_SG = tl.load(partial_stats + stat_SG, mask=mask_SG, other=0.0, cache_modifier=".cg")
        sum_SG = tl.load(
            partial_stats + MAX_ITEMS * K * QUERIES + stat_SG,
            mask=mask_SG,
            other=1.0,
            cache_modifier=".cg",
        )
        mix_SGD = tl.load(
            partial + stat_SG.to(tl.int64)[:, :, None] * D + d_D[None, None, :],
            mask=mask_SG[:, :, None] & (d_D[None, None, :] < D),
            other=0.0,
            cache_modifier=".cg",
        )
        top_SG = tl.where(s_ok[:, None], top_SG, float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(top_SG, axis=0))
        weight_SG = tl.exp2(top_SG - new_top_G[None, :])
        fade_G = tl.exp2(top_G - new_top_G)
        sum_G = sum_G * fade_G + tl.sum(sum_SG * weight_SG, axis=0)
        mix_GD = mix_GD * fade_G[:, None] + tl.sum(mix_SGD * weight_SG[:, :, None], axis=0)
        top_G = new_top_G
    if sinks is not None:
        sink_G = tl.load(sinks + head * G + g_G, mask=g_G < G, other=0.0)
        sum_G += sink_weight(sink_G, top_G)
    result_GD = mix_GD / sum_G[:, None]
    offset_GD = (head * G + g_G)[:, None] * D + d_D[None, :]
    mask_GD = (g_G[:, None] < G) & (d_D[None, :] < D)
    tl.store(out_row + offset_GD, result_GD.to(out.dtype.element_ty), mask=mask_GD)


@triton.jit
def _answer(
    q, kv_pages, kv_scales, pages, page_U, start, end, partial, partial_stats, arrivals, sinks,
    out, scale_log2, cap_log2, window, row, rows, length, chunk, first, first_chunk, num_chunks,
    STEP: tl.constexpr, Q_ROW: tl.constexpr, OUT_ROW: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr, MAX_ITEMS: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, TOGETHER: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr, MERGE_G: tl.constexpr, MERGE_S: tl.constexpr,
    WIDEN: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Attend to an item's chunk for its rows, of which there are TOGETHER at most."""
    head = tl.program_id(0)
    m_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, BLOCK_D)
    real_M = m_M < rows * G
    mask_MD = real_M[:, None] & (d_D[None, :] < D)
    head_M = (head * G + m_M % G) * D
    seen = None
    if TOGETHER > 1:  # each row sees a position more than the one before it
        length_M = tl.minimum(length - rows + 1 + m_M // G, length)
        begin_M = step_begin(length_M - 1, STEP) + 1
        seen = (tl.where(window > 0, begin_M - window, 0), length_M)
    if sinks is not None:
        is_query_M = m_M < TOGETHER * G
        sink_M = tl.load(sinks + head * G + m_M % G, mask=is_query_M, other=0.0, volatile=True)
    # entries are taken by words of two
    keys = kv_pages + head * (P * D if ENTRY is None else P * D // 2)
    arrival = arrivals + row * K + head
    # Into the L2 cache, which a layer's weights have emptied, for the end.
    tl.load(arrival, mask=num_chunks > 1, other=0, volatile=True)
    q_M = q + row.to(tl.int64) * Q_ROW + (m_M // G) * Q_ROW + head_M
    if ENTRY is None:
        top_M, sum_NM, mix_MD = attend_values(
            q_M, real_M, keys, pages, page_U, start, end, seen, scale_log2, cap_log2,
            PAGE_STRIDE, K, D, P, BLOCK_D, BLOCK_N, UNIT, WIDEN,
        )  # fmt: skip
    else:
        top_M, sum_NM, mix_MD = attend_entries(
            q_M, real_M, keys, kv_scales + head * P, pages, page_U, start, end, seen, scale_log2,
            cap_log2, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM, K, D, P, BLOCK_D, BLOCK_N, UNIT, WIDEN,
        )  # fmt: skip
    if LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    sum_M = tl.sum(sum_NM, axis=0)

    q_out = out + row.to(tl.int64) * OUT_ROW
    if num_chunks == 1:
        if sinks is not None:
            sum_M += sink_weight(sink_M, top_M)
        result_MD = mix_MD / sum_M[:, None]
        out_M = q_out + (m_M // G) * OUT_ROW + head_M
        result_MD = result_MD.to(out.dtype.element_ty)
        tl.store(out_M[:, None] + d_D[None, :], result_MD, mask=mask_MD)
    else:
        stat_M = ((first + chunk) * K + head) * QUERIES + m_M
        tl.store(partial + stat_M.to(tl.int64)[:, None] * D + d_D[None, :], mix_MD, mask=mask_MD)
        tl.store(partial_stats + stat_M, top_M, mask=real_M)
        tl.store(partial_stats + MAX_ITEMS * K * QUERIES + stat_M, sum_M, mask=real_M)
        # All threads' partial results are written before the one thread that says so releases
        # them; the one that finds itself last acquires everybody's.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            tl.store(arrival, 0)
            for number in range(rows):
                _merge(
                    partial + number * G * D, partial_stats + number * G, sinks, out,
                    q_out + number * OUT_ROW, first + first_chunk, num_chunks, head,
                    MAX_ITEMS, K, G, QUERIES, D, MERGE_G, BLOCK_D, MERGE_S,
                )  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q,
    kv_pages,
    kv_scales,  # or None
    page_table,
    items,
    num_items,
    partial,  # [I, K, M, D]
    partial_stats,  # [2, I, K, M]
    arrivals,  # [R, K]
    sinks,  # or None
    out,
    scale_log2,
    cap_log2,
    window,  # 0: none
    STEP: tl.constexpr, Q_ROW: tl.constexpr, OUT_ROW: tl.constexpr, TABLE_ROW: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, ENTRY: tl.constexpr, ASM: tl.constexpr,
    MAX_ITEMS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, TOGETHER: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    QUERIES: tl.constexpr = TOGETHER * G
    LAUNCH: tl.constexpr = PDL and not EARLY
    item = tl.program_id(1)  # heads are fastest: all of a page are read at about the same time
    count = tl.load(num_items, volatile=True)
    row, slot, chunk, size, length, first = load_item(items, item)
    rows = 1
    if TOGETHER > 1:
        rows = tl.load(items + item * ITEM_WORDS + NUM_ROWS, volatile=True)
    size = tl.maximum(size, 1)  # 0 in what was never an item
    begin = step_begin(length - rows, STEP) + 1
    seen_from = tl.where(window > 0, tl.maximum(begin - window, 0), 0)  # by the first row
    first_chunk = seen_from // size  # those before are out of the span
    is_real = (item < count) & (chunk >= first_chunk)
    num_chunks = (length - 1) // size - first_chunk + 1
    start = tl.maximum(chunk * size, seen_from)
    end = tl.where(is_real, tl.minimum((chunk + 1) * size, length), 0)

    # Page ids are one tile ahead, in registers: were they loaded where they are used, Triton would
    # give half of its pipeline's depth to them. Queries come after them: nothing waits twice.
    pages = page_table + slot.to(tl.int64) * TABLE_ROW
    page_U = load_pages(pages, start - start % UNIT, end, P, UNIT, BLOCK_N // UNIT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not is_real:
        return
    if TOGETHER == 1 or rows == 1:
        _answer(
            q, kv_pages, kv_scales, pages, page_U, start, end, partial, partial_stats, arrivals,
            sinks, out, scale_log2, cap_log2, window, row, 1, length, chunk, first, first_chunk,
            num_chunks, STEP, Q_ROW, OUT_ROW, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM, MAX_ITEMS,
            K, G, 1, QUERIES, D, P, BLOCK_G, BLOCK_D, BLOCK_N, UNIT, MERGE_G, MERGE_S, WIDEN,
            LAUNCH,
        )  # fmt: skip
    else:
        _answer(
            q, kv_pages, kv_scales, pages, page_U, start, end, partial, partial_stats, arrivals,
            sinks, out, scale_log2, cap_log2, window, row, rows, length, chunk, first, first_chunk,
            num_chunks, STEP, Q_ROW, OUT_ROW, PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM, MAX_ITEMS,
            K, G, TOGETHER, QUERIES, D, P, BLOCK_M, BLOCK_D, BLOCK_N, UNIT, MERGE_G, MERGE_S, WIDEN,
            LAUNCH,
        )  # fmt: skip


def decode_attention(
    call: AttentionCall,
    work: DecodeWork,
    num_rows: int,
    *,
    pdl: bool = False,
) -> None:
    """Attention of the step's decode rows, which `plan_decode` has put into `work`.

    Rows that are no decode rows are neither read nor written. A row's result depends on itself, on
    the length of its chunks and, in its last bits, on the rows that are one item with it.
    Pages wholly before the span are not read, nor is where they are.

    With pdl the plan and the page table are read above the wait: the launch before must be that of
    rotate_and_store, which lets this one start when all before it has ended.
    """
    q_THD, kv_pages, page_table_NL, out_THD, scale, span, softcap, kv_scales, sinks_H, _ = call
    assert work.span in (FULL, span), "planned for another span"
    _, _, kv_heads, page_tokens, head_dim = kv_pages.shape
    group = q_THD.shape[1] // kv_heads
    codes = Codes.of(LayerPages(kv_pages, kv_scales))
    if codes.entry is not None:
        codes = codes.words
    # what is multiplied as float32 takes registers as float32 does
    is_wide = q_THD.dtype == torch.float32
    element_bytes = q_THD.element_size() if is_wide else kv_pages.element_size()
    queries = work.rows_together * group
    tiling = work.tiling or DecodeTiling.of(head_dim, element_bytes, queries)
    scale_log2, cap_log2 = score_scale(scale, softcap)
    window, step = window_and_step(span)
    block_dim = padded(head_dim) if codes.entry is None else padded(max(head_dim, MIN_ENTRIES))
    merge_group = triton.next_power_of_2(group)
    early = num_rows == 1 and head_dim >= EARLY_WIDTH
    launch = dependent_launch(pdl, q_THD)
    merge_elements = tiling.merge_registers * 32 * tiling.num_warps
    _decode_kernel[(kv_heads, work.item_limit(num_rows))](
        q_THD,
        codes.pages,
        codes.scales,
        page_table_NL,
        work.items,
        work.num_items,
        work.partial_IKMD,
        work.partial_stats,
        work.arrivals_RK,
        sinks_H,
        out_THD,
        scale_log2,
        cap_log2,
        window,
        STEP=step,
        Q_ROW=q_THD.stride(0),
        OUT_ROW=out_THD.stride(0),
        TABLE_ROW=page_table_NL.stride(0),
        PAGE_STRIDE=codes.page_stride,
        SCALE_STRIDE=codes.scale_stride,
        ENTRY=codes.entry,
        ASM=codes.has_instructions,
        MAX_ITEMS=work.items.shape[0],
        K=kv_heads,
        G=group,
        TOGETHER=work.rows_together,
        D=head_dim,
        P=page_tokens,
        BLOCK_G=padded(group, LEAST_COLUMNS),
        BLOCK_M=padded(queries, LEAST_COLUMNS),
        BLOCK_D=block_dim,
        BLOCK_N=tiling.block_tokens,
        UNIT=math.gcd(page_tokens, tiling.block_tokens),
        MERGE_G=merge_group,
        MERGE_S=max(1, min(MAX_MERGE_CHUNKS, merge_elements // (merge_group * block_dim))),
        WIDEN=q_THD.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=MOST_REGISTERS if work.rows_together > 1 and tiling.num_warps == 2 else None,
        EARLY=early and launch["PDL"],
        **launch,
    )


def decode_attention_reference(call: AttentionCall, inputs: StepInputs, num_rows: int) -> None:
    for row in range(min(int(inputs.counts[NUM_DECODE_ROWS]), num_rows)):
        pages_L = call.page_table_NL[int(inputs.row_slot_R[row])]
        attend_reference(call, pages_L, row, int(inputs.q_start_R[row]), 1)
