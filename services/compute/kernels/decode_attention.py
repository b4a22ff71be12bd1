"""Paged attention for one query a row: split over the context as decode_plan's list says.

All query heads of a kv head share a tile, so that keys and values are read once. A row among
others of its length is one item and is written at once; a long one is several, and whichever of
them finishes last merges all (the split-KV scheme of Flash-Decoding, with the merge of stream-K).

Shape legend: T tokens, R rows, I items, N positions of a tile, H query heads, K kv heads, G query
heads of a kv head, D head width, P positions of a page, S chunks merged at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.compute.kernels.decode_plan import DecodeTiling, DecodeWork, load_item, padded
from services.compute.kernels.entry_attention import attend_entries
from services.compute.kernels.first_seen import step_begin, window_and_step
from services.compute.kernels.kv_entries import Codes
from services.compute.kernels.kv_format import LayerPages
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.prefill_attention import (
    attend_reference,
    capped,
    score_scale,
    sink_weight,
)
from services.compute.kernels.span import FULL
from services.compute.kernels.step_buffers import (
    NUM_DECODE_ROWS,
    AttentionCall,
    StepInputs,
)

MAX_MERGE_CHUNKS = 64

MIN_ENTRIES = 32
"""Of a padded head: half of them are words, of which tensor cores take 16 at least."""

EARLY_WIDTH = 129
"""From heads of this width on, the attention of one row lets the next kernel start with it: it
waits for memory more than it reads, and the products behind it ask for their weights meanwhile."""


@triton.jit
def _attend(
    q_row, keys, pages, page_N, start, end, scale_log2, cap_log2, PAGE_STRIDE: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of one head's queries: the greatest scores, the weights' sums by column, and the mix."""
    g_G = tl.arange(0, BLOCK_G)
    d_D = tl.arange(0, BLOCK_D)
    n_N = tl.arange(0, BLOCK_N)
    mask_GD = (g_G[:, None] < G) & (d_D[None, :] < D)
    q_GD = tl.load(q_row + g_G[:, None] * D + d_D[None, :], mask=mask_GD, other=0.0)
    dtype: tl.constexpr = q_row.dtype.element_ty
    if WIDEN:
        q_GD = q_GD.to(tl.float32)
    top_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    # Sums stay apart by column until the end: one reduction across warps less in each turn.
    sum_GN = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    mix_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for position in range(start, end, BLOCK_N):
        position_N = position + n_N
        # What lies beyond the context may be another sequence's NaN: it is not even loaded.
        real_N = position_N < end
        offset_N = page_N.to(tl.int64) * PAGE_STRIDE + (position_N % P) * D
        offset_ND = offset_N[:, None] + d_D[None, :]
        mask_ND = real_N[:, None] & (d_D[None, :] < D)
        k_ND = tl.load(keys + offset_ND, mask=mask_ND, other=0.0)
        v_ND = tl.load(keys + K * P * D + offset_ND, mask=mask_ND, other=0.0)
        if WIDEN:
            k_ND = k_ND.to(tl.float32)
            v_ND = v_ND.to(tl.float32)
        score_GN = tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        if cap_log2 is not None:
            score_GN = capped(score_GN, cap_log2)
        score_GN = tl.where(real_N[None, :], score_GN, float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(score_GN, axis=1))
        weight_GN = tl.exp2(score_GN - new_top_G[:, None])
        fade_G = tl.exp2(top_G - new_top_G)
        sum_GN = sum_GN * fade_G[:, None] + weight_GN
        mix_GD = mix_GD * fade_G[:, None]
        weight_GN = weight_GN.to(dtype).to(v_ND.dtype)
        mix_GD = tl.dot(weight_GN, v_ND, acc=mix_GD, input_precision="ieee")
        top_G = new_top_G
        next_N = position_N + BLOCK_N
        page_N = tl.load(pages + next_N // P, mask=next_N < end, other=0)
    return top_G, sum_GN, mix_GD


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q,
    kv_pages,
    kv_scales,  # or None
    page_table,
    items,
    num_items,
    partial,  # [I, K, G, D]
    partial_stats,  # [2, I, K, G]
    arrivals,  # [R, K]
    sinks,  # or None
    out,
    scale_log2,
    cap_log2,
    window,  # 0: none
    STEP: tl.constexpr,
    Q_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_G: tl.constexpr,
    MERGE_S: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)  # fastest: all heads of a page are read at about the same time
    item = tl.program_id(1)
    if sinks is not None:
        sinks_G = head * G + tl.arange(0, BLOCK_G)
        sink_G = tl.load(sinks + sinks_G, mask=sinks_G < (head + 1) * G, other=0.0, volatile=True)
    count = tl.load(num_items, volatile=True)
    row, slot, chunk, size, length, first = load_item(items, item)
    size = tl.maximum(size, 1)  # 0 in what was never an item
    begin = step_begin(length - 1, STEP) + 1
    seen_from = tl.where(window > 0, tl.maximum(begin - window, 0), 0)
    first_chunk = seen_from // size  # those before are out of the span
    is_real = (item < count) & (chunk >= first_chunk)
    num_chunks = (length - 1) // size - first_chunk + 1
    start = tl.maximum(chunk * size, seen_from)
    end = tl.where(is_real, tl.minimum((chunk + 1) * size, length), 0)

    g_G = tl.arange(0, BLOCK_G)
    d_D = tl.arange(0, BLOCK_D)
    mask_GD = (g_G[:, None] < G) & (d_D[None, :] < D)
    offset_GD = (head * G + g_G)[:, None] * D + d_D[None, :]
    pages = page_table + slot.to(tl.int64) * TABLE_ROW
    # entries are taken by words of two
    keys = kv_pages + head * (P * D if ENTRY is None else P * D // 2)

    # Page ids are one tile ahead, in registers: were they loaded where they are used, Triton would
    # give half of its pipeline's depth to them. Queries come after them: nothing waits twice.
    first_N = start + tl.arange(0, BLOCK_N)
    page_N = tl.load(pages + first_N // P, mask=first_N < end, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not is_real:
        return
    arrival = arrivals + row * K + head
    # Into the L2 cache, which a layer's weights have emptied, for the end.
    tl.load(arrival, mask=num_chunks > 1, other=0, volatile=True)
    q_row = q + row.to(tl.int64) * Q_ROW + head * G * D
    if ENTRY is None:
        top_G, sum_GN, mix_GD = _attend(
            q_row, keys, pages, page_N, start, end, scale_log2, cap_log2,
            PAGE_STRIDE, K, G, D, P, BLOCK_G, BLOCK_D, BLOCK_N, WIDEN,
        )  # fmt: skip
    else:
        top_G, sum_GN, mix_GD = attend_entries(
            q_row, keys, kv_scales + head * P, pages, page_N, start, end, scale_log2, cap_log2,
            PAGE_STRIDE, SCALE_STRIDE, ENTRY, ASM, K, G, D, P, BLOCK_G, BLOCK_D, BLOCK_N, WIDEN,
        )  # fmt: skip
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    sum_G = tl.sum(sum_GN, axis=1)

    out_row = out + row.to(tl.int64) * OUT_ROW
    if num_chunks == 1:
        if sinks is not None:
            sum_G += sink_weight(sink_G, top_G)
        result_GD = mix_GD / sum_G[:, None]
        tl.store(out_row + offset_GD, result_GD.to(out.dtype.element_ty), mask=mask_GD)
    else:
        stat_G = ((first + chunk) * K + head) * G + g_G
        tl.store(partial + stat_G.to(tl.int64)[:, None] * D + d_D[None, :], mix_GD, mask=mask_GD)
        tl.store(partial_stats + stat_G, top_G, mask=g_G < G)
        tl.store(partial_stats + MAX_ITEMS * K * G + stat_G, sum_G, mask=g_G < G)
        # All threads' partial results are written before the one thread that says so releases
        # them; the one that finds itself last acquires everybody's.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        if arrived == num_chunks - 1:
            tl.store(arrival, 0)
            m_G = tl.arange(0, MERGE_G)
            s_S = tl.arange(0, MERGE_S)
            top_M = tl.full([MERGE_G], float("-inf"), tl.float32)
            sum_M = tl.zeros([MERGE_G], tl.float32)
            mix_MD = tl.zeros([MERGE_G, BLOCK_D], tl.float32)
            for begin in range(0, num_chunks, MERGE_S):
                s_ok = begin + s_S < num_chunks
                place_S = first + first_chunk + begin + s_S
                stat_SM = (place_S[:, None] * K + head) * G + m_G[None, :]
                mask_SM = s_ok[:, None] & (m_G[None, :] < G)
                # Read past the first-level cache, which knows nothing of other programs' writes.
                top_SM = tl.load(
                    partial_stats + stat_SM, mask=mask_SM, other=0.0, cache_modifier=".cg"
                )
                sum_SM = tl.load(
                    partial_stats + MAX_ITEMS * K * G + stat_SM,
                    mask=mask_SM,
                    other=1.0,
                    cache_modifier=".cg",
                )
                mix_SMD = tl.load(
                    partial + stat_SM.to(tl.int64)[:, :, None] * D + d_D[None, None, :],
                    mask=mask_SM[:, :, None] & (d_D[None, None, :] < D),
                    other=0.0,
                    cache_modifier=".cg",
                )
                top_SM = tl.where(s_ok[:, None], top_SM, float("-inf"))
                new_top_M = tl.maximum(top_M, tl.max(top_SM, axis=0))
                weight_SM = tl.exp2(top_SM - new_top_M[None, :])
                fade_M = tl.exp2(top_M - new_top_M)
                sum_M = sum_M * fade_M + tl.sum(sum_SM * weight_SM, axis=0)
                mix_MD = mix_MD * fade_M[:, None] + tl.sum(mix_SMD * weight_SM[:, :, None], axis=0)
                top_M = new_top_M
            if sinks is not None:
                sink_M = tl.load(sinks + head * G + m_G, mask=m_G < G, other=0.0)
                sum_M += sink_weight(sink_M, top_M)
            result_MD = mix_MD / sum_M[:, None]
            offset_MD = (head * G + m_G)[:, None] * D + d_D[None, :]
            tl.store(
                out_row + offset_MD,
                result_MD.to(out.dtype.element_ty),
                mask=(m_G[:, None] < G) & (d_D[None, :] < D),
            )


def decode_attention(
    call: AttentionCall,
    work: DecodeWork,
    num_rows: int,
    *,
    pdl: bool = False,
) -> None:
    """Attention of the step's decode rows, which `plan_decode` has put into `work`.

    Rows that are no decode rows are neither read nor written. A row's result depends on itself and
    on the length of its chunks. Pages wholly before the span are not read, nor is where they are.

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
    tiling = work.tiling or DecodeTiling.of(head_dim, element_bytes, group)
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
        work.partial_IKGD,
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
        D=head_dim,
        P=page_tokens,
        BLOCK_G=padded(group),
        BLOCK_D=block_dim,
        BLOCK_N=tiling.block_tokens,
        MERGE_G=merge_group,
        MERGE_S=max(1, min(MAX_MERGE_CHUNKS, merge_elements // (merge_group * block_dim))),
        WIDEN=q_THD.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        EARLY=early and launch["PDL"],
        **launch,
    )


def decode_attention_reference(call: AttentionCall, inputs: StepInputs, num_rows: int) -> None:
    for row in range(min(int(inputs.counts[NUM_DECODE_ROWS]), num_rows)):
        pages_L = call.page_table_NL[int(inputs.row_slot_R[row])]
        attend_reference(call, pages_L, row, int(inputs.q_start_R[row]), 1)
