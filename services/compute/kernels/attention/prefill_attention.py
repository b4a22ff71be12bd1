"""Paged causal attention of chunks, after FlashAttention-2 (Dao, 2023) over pages as in vLLM.

A query's result depends on its own query vector and its sequence's keys and values alone, bit for
bit: keys are taken in blocks that begin at multiples of BLOCK_N from position 0, a block in which a
query sees nothing changes none of its sums, and masked and unmasked blocks go through the same
arithmetic (products with sums are written as `fma`, or the compiler would contract one loop's and
not the other's).

Shape legend: M rows of a tile (queries times heads of a group), N keys, D head width (padded to a
power of two), H query heads, Q queries, I items, R rows of the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.attention.prefill_plan import (
    PrefillTiling,
    PrefillWork,
    load_tile,
    num_items_bound,
    tiling_of,
)
from services.compute.kernels.kv.kv_entries import (
    Codes,
    decode,
    half_queries,
    load_scales,
    split_scales,
)
from services.compute.kernels.kv.kv_format import LayerPages, dequantize
from services.compute.kernels.step.first_seen import step_begin, window_and_step
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs

LOG2_E = 1.4426950408889634  # powers of two are the hardware's
SINK_SCALE = tl.constexpr(LOG2_E)


@triton.jit
def capped(score, cap_log2):
    """A score to base 2, capped by tanh, from 2 / cap times the uncapped one (see `score_scale`).

    cap * tanh(x / cap) is cap - 2 * cap / (1 + exp(2 * x / cap)). Written as `fma`, so that all
    copies of a loop round alike.
    """
    return tl.fma(1.0 / (1.0 + tl.exp2(score)), -2.0 * cap_log2, cap_log2)


@triton.jit
def sink_weight(sink, top):
    """What a sink adds to a sum of weights that are relative to the greatest score, to base 2."""
    return tl.exp2(tl.fma(sink, SINK_SCALE, -top))


def score_scale(scale: float, softcap: float) -> tuple[float, float | None]:
    """What products are multiplied by, and the cap to base 2: both of `capped`, or of none."""
    if softcap:
        return 2 * scale * LOG2_E / softcap, softcap * LOG2_E
    return scale * LOG2_E, None


@triton.jit
def _load_rows(ptr_ND, valid_N, valid_D, MASK_N: tl.constexpr, MASK_D: tl.constexpr):
    """Rows of keys or values; what is masked reads as 0, whatever lies there."""
    if MASK_N:
        if MASK_D:
            return tl.load(ptr_ND, mask=valid_N[:, None] & valid_D[None, :], other=0.0)
        else:
            return tl.load(ptr_ND, mask=valid_N[:, None], other=0.0)
    else:
        if MASK_D:
            return tl.load(ptr_ND, mask=valid_D[None, :], other=0.0)
        else:
            return tl.load(ptr_ND)


@triton.jit
def _attend(
    acc_MD,
    sum_M,
    max_M,
    q_MD,
    position_M,
    keys,
    scales,
    pages,
    begin,
    end,
    low,
    high,
    window,
    scale_log2,
    cap_log2,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    weight_dtype: tl.constexpr,
    ASM: tl.constexpr,
):
    """Take in the blocks from `begin` to `end`; where MASKED, read keys in [low, high) only."""
    SCALED: tl.constexpr = cap_log2 is not None or ENTRY is not None  # scores are to base 2
    WIDE: tl.constexpr = WIDEN or weight_dtype == tl.float32
    offset_D = tl.arange(0, PADDED_D)
    for start in tl.range(begin, end, BLOCK_N):
        position_N = start + tl.arange(0, BLOCK_N)
        valid_N = (position_N >= low) & (position_N < high)
        if MASKED:
            page_N = tl.load(pages + position_N // PAGE_TOKENS, mask=valid_N, other=0)
        else:
            page_N = tl.load(pages + position_N // PAGE_TOKENS)
        offset_N = page_N.to(tl.int64) * PAGE_STRIDE + (position_N % PAGE_TOKENS) * D
        key_ND = keys + offset_N[:, None] + offset_D[None, :]
        k_ND = _load_rows(key_ND, valid_N, offset_D < D, MASKED, PADDED_D != D)
        v_ND = _load_rows(key_ND + VALUE_OFFSET, valid_N, offset_D < D, MASKED, PADDED_D != D)
        if ENTRY is not None:
            scale_at_N = page_N.to(tl.int64) * SCALE_STRIDE + position_N % PAGE_TOKENS
            k_scale_N, v_scale_N = load_scales(scales + scale_at_N, valid_N | (not MASKED))
            k_scale_N = k_scale_N * scale_log2
            number_N, log2_N, inverse_N = split_scales(v_scale_N)
            k_ND = decode(k_ND, ENTRY, WIDE, ASM)
            v_ND = decode(v_ND, ENTRY, WIDE, ASM)
        elif WIDEN:
            k_ND = k_ND.to(tl.float32)
            v_ND = v_ND.to(tl.float32)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if cap_log2 is not None:
            if ENTRY is not None:
                score_MN = capped(score_MN * k_scale_N[None, :], cap_log2) + log2_N[None, :]
            else:
                score_MN = capped(score_MN * scale_log2, cap_log2)
        elif ENTRY is not None:
            # Scales of values are in the weights, but the greatest weight is near 1 for any scales.
            score_MN = tl.fma(score_MN, k_scale_N[None, :], log2_N[None, :])
        if MASKED:
            seen_MN = position_N[None, :] <= position_M[:, None]
            if WINDOWED:
                begin_M = step_begin(position_M, STEP)
                seen_MN = seen_MN & (position_N[None, :] > begin_M[:, None] - window)
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        if SCALED:
            new_max_M = tl.maximum(max_M, tl.max(score_MN, axis=1))
        else:
            new_max_M = tl.maximum(max_M, tl.max(score_MN, axis=1) * scale_log2)
        if WINDOWED:  # queries that have seen nothing yet stay at zero sums
            shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        else:
            shift_M = new_max_M
        if SCALED:
            weight_MN = tl.math.exp2(score_MN - shift_M[:, None])
        else:
            weight_MN = tl.math.exp2(tl.fma(score_MN, scale_log2, -shift_M[:, None]))
        decay_M = tl.math.exp2(max_M - shift_M)
        if ENTRY is not None:  # products with powers of two: they round nowhere
            sum_M = tl.fma(sum_M, decay_M, tl.sum(weight_MN * inverse_N[None, :], axis=1))
            weight_MN = weight_MN * number_N[None, :]
        else:
            sum_M = tl.fma(sum_M, decay_M, tl.sum(weight_MN, axis=1))
        acc_MD = acc_MD * decay_M[:, None]
        weight_MN = weight_MN.to(weight_dtype).to(v_ND.dtype)
        acc_MD = tl.dot(weight_MN, v_ND, acc_MD, input_precision="ieee")
        max_M = new_max_M
    return acc_MD, sum_M, max_M


@triton.jit(do_not_specialize=["window"])
def _prefill_attention_kernel(
    q_THD,
    kv_pages,
    kv_scales,  # or None
    page_table,
    row_slot_R,
    q_start_R,
    q_len_R,
    token_start_R,
    items_I2,
    num_items_ptr,
    sinks_H,  # or None
    out_THD,
    scale_log2,
    cap_log2,
    window,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ITEM_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tiles in turn: forwards in even rounds and backwards in odd ones, since they get cheaper."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    SPLITS: tl.constexpr = (ITEM_Q + BLOCK_Q - 1) // BLOCK_Q
    VALUE_OFFSET: tl.constexpr = K * PAGE_TOKENS * D
    # Entries are multiplied as float16, which has all of them, unless all is float32.
    HALF: tl.constexpr = ENTRY is not None and q_THD.dtype.element_ty != tl.float32
    weight_dtype: tl.constexpr = tl.float16 if HALF else q_THD.dtype.element_ty

    forwards = tl.program_id(0)
    num_programs = tl.num_programs(0)
    backwards = num_programs - 1 - forwards
    num_tiles = tl.load(num_items_ptr) * (K * SPLITS)
    num_rounds = num_tiles // num_programs
    last_place = tl.where(num_rounds % 2 == 0, forwards, backwards)
    num_rounds += (last_place < num_tiles % num_programs).to(tl.int32)

    row_M = tl.arange(0, BLOCK_M)
    offset_D = tl.arange(0, PADDED_D)
    for step in tl.range(0, num_rounds):
        tile = step * num_programs + tl.where(step % 2 == 0, forwards, backwards)
        item = tile // (K * SPLITS)
        head = tile % K
        split = tile % (K * SPLITS) // K
        row, first, num_q = load_tile(items_I2, q_len_R, item, split, ITEM_Q, BLOCK_Q)
        first_position = tl.load(q_start_R + row) + first
        pages = page_table + tl.load(row_slot_R + row).to(tl.int64) * TABLE_STRIDE
        keys = kv_pages + head * (PAGE_TOKENS * D)
        scales = None
        if ENTRY is not None:
            scales = kv_scales + head * PAGE_TOKENS

        query_M = row_M // G
        token_M = (tl.load(token_start_R + row) + first + query_M).to(tl.int64)
        column_M = head * (G * D) + row_M % G * D
        valid_MD = (query_M < num_q)[:, None] & (offset_D < D)[None, :]
        q_ptr = q_THD + token_M[:, None] * Q_STRIDE + column_M[:, None] + offset_D[None, :]
        q_MD = tl.load(q_ptr, mask=valid_MD, other=0.0)
        q_scale = scale_log2
        if HALF:
            q_MD, q_scale = half_queries(q_MD, scale_log2, WIDEN)
        elif WIDEN:
            q_MD = q_MD.to(tl.float32)
        position_M = first_position + query_M

        # No block for a tile without queries; all bounds but `low` and `high` are of whole blocks.
        high = tl.where(num_q > 0, first_position + num_q, 0)
        diagonal = tl.where(num_q > 0, (first_position + 1) // BLOCK_N * BLOCK_N, 0)
        acc_MD = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        low = 0
        begin = 0
        if WINDOWED:
            low = tl.maximum(step_begin(first_position, STEP) - window + 1, 0)
            begin = tl.minimum(low // BLOCK_N * BLOCK_N, diagonal)
            # from here on the last query sees all
            inside = tl.maximum(step_begin(high - 1, STEP) + 1 - window, 0)
            inside = tl.minimum((inside + BLOCK_N - 1) // BLOCK_N * BLOCK_N, diagonal)
            acc_MD, sum_M, max_M = _attend(
                acc_MD, sum_M, max_M, q_MD, position_M, keys, scales, pages,
                begin, inside, low, high, window, q_scale,
                cap_log2,
                D, PADDED_D, PAGE_TOKENS, PAGE_STRIDE, VALUE_OFFSET, SCALE_STRIDE, ENTRY,
                BLOCK_N, True, True, STEP, WIDEN, weight_dtype, ASM,
            )  # fmt: skip
            begin = tl.maximum(begin, inside)
        acc_MD, sum_M, max_M = _attend(
            acc_MD, sum_M, max_M, q_MD, position_M, keys, scales, pages,
            begin, diagonal, low, high, window, q_scale,
                cap_log2,
            D, PADDED_D, PAGE_TOKENS, PAGE_STRIDE, VALUE_OFFSET, SCALE_STRIDE, ENTRY,
            BLOCK_N, False, WINDOWED, STEP, WIDEN, weight_dtype, ASM,
        )  # fmt: skip
        acc_MD, sum_M, max_M = _attend(
            acc_MD, sum_M, max_M, q_MD, position_M, keys, scales, pages,
            diagonal, high, low, high, window, q_scale,
                cap_log2,
            D, PADDED_D, PAGE_TOKENS, PAGE_STRIDE, VALUE_OFFSET, SCALE_STRIDE, ENTRY,
            BLOCK_N, True, WINDOWED, STEP, WIDEN, weight_dtype, ASM,
        )  # fmt: skip
        out_ptr = out_THD + token_M[:, None] * OUT_STRIDE + column_M[:, None] + offset_D[None, :]
        if sinks_H is not None:
            sink_M = tl.load(sinks_H + head * G + row_M % G)
            sum_M += sink_weight(sink_M, max_M)
        sum_M = tl.where(query_M < num_q, sum_M, 1.0)  # a tile without queries has no sums
        out_MD = acc_MD * (1.0 / sum_M)[:, None]
        tl.store(out_ptr, out_MD.to(out_THD.dtype.element_ty), mask=valid_MD)


def prefill_attention(
    call: AttentionCall,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    tiling: PrefillTiling | None = None,
) -> None:
    """Attention of every planned query. `num_tokens` is the bucket; `tiling` is there to measure
    others than the chosen one. Pages wholly before the span are not read, nor is where they are.
    """
    q_THD, kv_pages, page_table_NL, out_THD, scale, span, softcap, kv_scales, sinks_H, _ = call
    _, num_heads, width = q_THD.shape
    _, _, num_kv_heads, page_tokens, _ = kv_pages.shape
    assert num_heads == num_kv_heads * work.group
    assert q_THD.stride()[1:] == (width, 1) and out_THD.stride()[1:] == (width, 1)
    codes = Codes.of(LayerPages(kv_pages, kv_scales))
    tiling = tiling or tiling_of(q_THD.dtype, width)
    block_m = max(tiling.block_m, triton.next_power_of_2(work.group))
    scale_log2, cap_log2 = score_scale(scale, softcap)
    window, step = window_and_step(span)
    num_items = num_items_bound(num_tokens, work.max_rows, work.block_q)
    splits = triton.cdiv(work.block_q, block_m // work.group)
    num_programs = min(num_items * splits * num_kv_heads, work.num_sms * tiling.programs_per_sm)
    _prefill_attention_kernel[(num_programs,)](
        q_THD,
        codes.pages,
        codes.scales,
        page_table_NL,
        inputs.row_slot_R,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        work.items_I2,
        work.num_items,
        sinks_H,
        out_THD,
        scale_log2,
        cap_log2,
        window,
        Q_STRIDE=q_THD.stride(0),
        OUT_STRIDE=out_THD.stride(0),
        TABLE_STRIDE=page_table_NL.stride(0),
        PAGE_STRIDE=codes.page_stride,
        SCALE_STRIDE=codes.scale_stride,
        ENTRY=codes.entry,
        ASM=codes.has_instructions,
        K=num_kv_heads,
        G=work.group,
        D=width,
        PADDED_D=max(16, triton.next_power_of_2(width)),
        PAGE_TOKENS=page_tokens,
        ITEM_Q=work.block_q,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        WINDOWED=window > 0,
        STEP=step,
        WIDEN=q_THD.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def prefill_attention_reference(call: AttentionCall, inputs: StepInputs, work: PrefillWork) -> None:
    for row, first in work.items_I2[: int(work.num_items)].tolist():
        q_len = min(work.block_q, int(inputs.q_len_R[row]) - first)
        token = int(inputs.token_start_R[row]) + first
        pages_L = call.page_table_NL[int(inputs.row_slot_R[row])]
        attend_reference(call, pages_L, token, int(inputs.q_start_R[row]) + first, q_len)


def attend_reference(
    call: AttentionCall, pages_L: Tensor, token: int, position: int, q_len: int
) -> None:
    """Attention of the queries from `token` on, which stand at `position` and after it."""
    q_THD, kv_pages, _, out_THD, scale, span, softcap, kv_scales, sinks_H, _ = call
    group, page_tokens = q_THD.shape[1] // kv_pages.shape[2], kv_pages.shape[3]
    end = position + q_len
    begin = span.first_position(position)  # what is older may be gone
    first_page, skipped = divmod(begin, page_tokens)
    pages = pages_L[first_page : -(-end // page_tokens)].long()
    kept = LayerPages(kv_pages[pages], None if kv_scales is None else kv_scales[pages])
    kv_2KND = dequantize(kept, q_THD.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)
    kv_2KND = kv_2KND[:, :, skipped : skipped + end - begin]
    keys_HND, values_HND = kv_2KND.repeat_interleave(group, dim=1)
    query_Q1 = torch.arange(position, end, device=q_THD.device)[:, None]
    key_1N = torch.arange(begin, end, device=q_THD.device)[None, :]
    hidden_QN = (key_1N > query_Q1) | (key_1N < span.first_position(query_Q1))
    scores_HQN = q_THD[token : token + q_len].transpose(0, 1) @ keys_HND.transpose(1, 2) * scale
    if softcap:
        scores_HQN = (scores_HQN / softcap).tanh() * softcap
    scores_HQN = scores_HQN.masked_fill(hidden_QN, -torch.inf)
    if sinks_H is not None:
        sinks_HQ1 = sinks_H.to(scores_HQN)[:, None, None].expand(-1, q_len, 1)
        scores_HQN = torch.cat((scores_HQN, sinks_HQ1), dim=-1)
    weights_HQN = scores_HQN.softmax(dim=-1)[:, :, : end - begin]
    out_THD[token : token + q_len] = (weights_HQN @ values_HND).transpose(0, 1)
