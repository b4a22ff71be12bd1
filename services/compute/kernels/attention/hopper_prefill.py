"""Paged causal attention of chunks on Hopper, after FlashAttention-3 (Shah et al., 2024).

One warp has the copy engine bring pages of keys and values, or warps make numbers of a cache's 8
bits (`hopper_widen`). Two warpgroups take half of an item's rows each: a warpgroup weighs a block's
scores while its tensor cores multiply the values of the block before. An H100 reaches 617 TFLOP/s
for a prompt of 4,096 (8B) where the kernel of prefill_attention, which has the same promises and
serves all other devices, heads and pages, reaches 370. In Gluon, since plain Triton has no say in
which warps do what, nor in when a product is waited for.

Shape legend: M rows of a warpgroup (queries times heads of a group), N keys of a block, D head
width, P positions of a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from services.compute.kernels.attention.hopper_attend import (
    attend_blocks,
    attend_last_values,
    make_barriers,
)
from services.compute.kernels.attention.hopper_fetch import (
    HALF_ROWS,
    PANEL,
    fetch_blocks,
    fetch_queries,
    first_seen,
    item_at,
    num_rounds,
)
from services.compute.kernels.attention.hopper_widen import numbers_of, widen_blocks
from services.compute.kernels.attention.prefill_attention import (
    LOG2_E,
    prefill_attention,
    score_scale,
)
from services.compute.kernels.attention.prefill_plan import PrefillWork, num_items_bound
from services.compute.kernels.hopper import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    HOPPER,
    MAX_REGISTERS,
    SWIZZLED,
)
from services.compute.kernels.kv.kv_entries import Codes
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.step.first_seen import window_and_step
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs, page_stride

_SINK_SCALE = gl.constexpr(LOG2_E)
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, element_bitwidth=32, rank=2))
BLOCK_N = {64: 128, 128: 128, 256: 64}  # by head width, padded: the order of the sums
STAGES = 2  # of keys and of values; 227 KiB of shared memory have no room for three


class Warps(NamedTuple):
    """How many bring in operands, and what registers a thread has."""

    bringing: int
    attending_registers: int
    bringing_registers: int
    max_registers: int


FETCHING = Warps(1, ATTENDING_REGISTERS, FETCHING_REGISTERS, MAX_REGISTERS)
# Eight warps take 308 us where four take 351 (4,096 tokens of 8B in FP8); sums of 256 columns leave
# registers for four.
WIDENING = {64: Warps(8, 192, 64, 128), 128: Warps(8, 192, 64, 128), 256: Warps(4, 200, 104, 168)}


@gluon.jit
def _attend(HALF: gl.constexpr, operands, places, scales, sizes: gl.constexpr):
    """A warpgroup: the first or the second half of each item's rows."""
    q_buffers, blocks, barriers, q_THD, out_THD, sinks_H = operands
    q_start_R, q_len_R, token_start_R, items_I2, num_tiles = places
    window = scales[0]
    (
        Q_STRIDE, OUT_STRIDE, K, G, D, PADDED_D, P, ITEM_Q, BLOCK_N, STAGES, Q_BUFFERS, WINDOWED,
        STEP,
    ) = sizes  # fmt: skip
    TILE_Q: gl.constexpr = HALF_ROWS // G
    loop: gl.constexpr = (TILE_Q, P, BLOCK_N, STAGES, WINDOWED, STEP)
    dtype: gl.constexpr = q_THD.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PADDED_D, PADDED_D // 8], [4, 1], [1, 0])
    query_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, scores)) // G
    head_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, scores)) % G
    line_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, lines))
    offset_D = gl.arange(0, PADDED_D, layout=gl.SliceLayout(0, lines))

    row, first, head = item_at(items_I2, 0, num_tiles, K, K)
    next_row, next_first, next_head = item_at(items_I2, 1, num_tiles, K, K)
    q_start, q_len = gl.load(q_start_R + row), gl.load(q_len_R + row)
    token_start = gl.load(token_start_R + row)
    fetch_queries(
        q_buffers.index(HALF), q_THD, token_start + first + HALF * TILE_Q,
        q_len - first - HALF * TILE_Q, head, Q_STRIDE, G, D, PADDED_D,
    )  # fmt: skip
    block = 0
    for step in range(num_rounds(num_tiles)):
        item_q = gl.minimum(q_len - first, ITEM_Q)
        high = q_start + first + item_q
        low = first_seen(q_start + first, window, WINDOWED, STEP)
        num_q = item_q - HALF * TILE_Q
        first_position = q_start + first + HALF * TILE_Q
        token = token_start + first + HALF * TILE_Q
        this_head = head
        # The next tile's place is known by now, and the place of the one after it is asked for.
        q_start, q_len = gl.load(q_start_R + next_row), gl.load(q_len_R + next_row)
        token_start = gl.load(token_start_R + next_row)
        first, head = next_first, next_head
        next_row, next_first, next_head = item_at(items_I2, step + 2, num_tiles, K, K)

        q_MD = q_buffers.index(step % Q_BUFFERS * 2 + HALF)
        async_copy.wait_group(0)
        fence_async_shared()
        if Q_BUFFERS == 2:
            fetch_queries(
                q_buffers.index((step + 1) % 2 * 2 + HALF), q_THD,
                token_start + first + HALF * TILE_Q, q_len - first - HALF * TILE_Q, head,
                Q_STRIDE, G, D, PADDED_D,
            )  # fmt: skip

        acc_MD, weight_MN, max_M, sum_M, block = attend_blocks(
            q_MD, None, blocks, barriers, block, low, high, first_position,
            first_position + query_M, scales, loop,
        )  # fmt: skip
        acc_MD = attend_last_values(acc_MD, weight_MN, blocks, barriers, block, low, high, loop)
        block += 1

        if sinks_H is not None:
            sink_M = gl.load(sinks_H + this_head * G + head_M)
            sum_M += gl.exp2(gl.fma(sink_M, _SINK_SCALE, -max_M))
        sum_M = gl.where(query_M < num_q, sum_M, 1.0)  # where there are no queries are no sums
        acc_MD *= gl.convert_layout(1.0 / sum_M, gl.SliceLayout(1, sums))[:, None]
        q_MD.store(acc_MD.to(dtype))  # by way of where the queries were, so as to write whole lines
        at_M = (token + line_M // G).to(gl.int64) * OUT_STRIDE
        at_M += this_head * (G * D) + line_M % G * D
        valid_MD = (line_M // G < gl.minimum(num_q, TILE_Q))[:, None] & (offset_D < D)[None, :]
        out_ptr = out_THD + at_M[:, None] + offset_D[None, :]
        gl.store(out_ptr, q_MD.load(lines), mask=valid_MD)
        if Q_BUFFERS == 1:
            fetch_queries(
                q_MD, q_THD, token_start + first + HALF * TILE_Q, q_len - first - HALF * TILE_Q,
                head, Q_STRIDE, G, D, PADDED_D,
            )  # fmt: skip


@gluon.jit
def _bring(
    cache,
    operands,
    places,
    scales,
    strides: gl.constexpr,
    NUMBERS: gl.constexpr,
    sizes: gl.constexpr,
):
    """What brings in the blocks of keys and values."""
    pool, kv_scales, page_table, row_slot_R = cache
    _, blocks, barriers, _, _, _ = operands
    key_blocks, _, value_blocks, value_parts = blocks
    q_start_R, q_len_R, _, items_I2, num_tiles = places
    window = scales[0]
    TABLE_STRIDE, PAGE_ROWS, PAGE_STRIDE, SCALE_STRIDE = strides
    _, _, K, G, D, PADDED_D, P, ITEM_Q, BLOCK_N, STAGES, _, WINDOWED, STEP = sizes
    if NUMBERS is None:
        key_parts = key_blocks._reinterpret(value_parts.dtype, value_parts.shape, SWIZZLED)
        fetch_blocks(
            pool, key_parts, value_parts, barriers, page_table, row_slot_R, q_start_R, q_len_R,
            items_I2, num_tiles, window, TABLE_STRIDE, PAGE_ROWS, K, PADDED_D, P, ITEM_Q, BLOCK_N,
            STAGES, WINDOWED, STEP,
        )  # fmt: skip
    else:
        key_words = key_blocks._reinterpret(gl.int32, [STAGES, BLOCK_N, PADDED_D // 2], WORDS)
        value_words = value_blocks._reinterpret(gl.int32, [STAGES, BLOCK_N, PADDED_D // 2], WORDS)
        widen_blocks(
            pool, kv_scales, key_words, value_words, barriers, page_table, row_slot_R, q_start_R,
            q_len_R, items_I2, num_tiles, window, TABLE_STRIDE, PAGE_STRIDE, SCALE_STRIDE, NUMBERS,
            K, D, P, ITEM_Q, BLOCK_N, STAGES, WINDOWED, STEP,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["window"])
def _hopper_attention_kernel(
    pool,  # boxes of pages; words of entries where there are
    scales,  # or None
    q_THD,
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
    Q_STRIDE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    NUMBERS: gl.constexpr,  # of entries, by which instructions; or None
    K: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
    P: gl.constexpr,
    ITEM_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    WINDOWED: gl.constexpr,
    STEP: gl.constexpr,
    SHARED: gl.constexpr,
    ATTENDING: gl.constexpr,
    BRINGING: gl.constexpr,
    BRINGING_WARPS: gl.constexpr,
):
    dtype: gl.constexpr = q_THD.dtype.element_ty
    PARTS: gl.constexpr = STAGES * (PADDED_D // PANEL) * (BLOCK_N // P)
    q_buffers = gl.allocate_shared_memory(dtype, [2 * Q_BUFFERS, HALF_ROWS, PADDED_D], SHARED)
    key_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, PADDED_D], SHARED)
    value_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, PADDED_D], SHARED)
    # The same bytes as a copy fills them: a page's rows in one panel of columns.
    value_parts = value_blocks._reinterpret(dtype, [PARTS, P, PANEL], SHARED)
    barriers = make_barriers(STAGES)
    blocks = (key_blocks, None, value_blocks, value_parts)
    num_tiles = gl.load(num_items_ptr) * K
    operands = (q_buffers, blocks, barriers, q_THD, out_THD, sinks_H)
    places = (q_start_R, q_len_R, token_start_R, items_I2, num_tiles)
    of_scores = (window, scale_log2, cap_log2)
    sizes: gl.constexpr = (
        Q_STRIDE, OUT_STRIDE, K, G, D, PADDED_D, P, ITEM_Q, BLOCK_N, STAGES, Q_BUFFERS, WINDOWED,
        STEP,
    )  # fmt: skip
    cache = (pool, scales, page_table, row_slot_R)
    strides: gl.constexpr = (TABLE_STRIDE, PAGE_ROWS, PAGE_STRIDE, SCALE_STRIDE)
    gl.warp_specialize(
        [
            (_attend, (0, operands, places, of_scores, sizes)),
            (_attend, (1, operands, places, of_scores, sizes)),
            (_bring, (cache, operands, places, of_scores, strides, NUMBERS, sizes)),
        ],
        [4, BRINGING_WARPS],
        [ATTENDING, BRINGING],
    )


def serves(call: AttentionCall) -> bool:
    """Whether this device, these heads and these pages are what the kernel is written for."""
    q_THD, kv_pages = call.q_THD, call.kv_pages
    width, page_tokens = q_THD.shape[2], kv_pages.shape[3]
    return (
        q_THD.is_cuda
        and torch.cuda.get_device_capability(q_THD.device) == HOPPER
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and 64 <= width <= 256
        and width % (8 if call.kv_scales is None else 16) == 0
        and page_tokens in (8, 16, 32, 64)
        and (call.kv_scales is not None or page_stride(kv_pages) % width == 0)
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q_THD, kv_pages, call.out_THD))
        and q_THD.stride(0) % 8 == call.out_THD.stride(0) % 8 == 0
    )


def chunk_attention(
    call: AttentionCall, inputs: StepInputs, work: PrefillWork, num_tokens: int
) -> None:
    """Attention of every planned query, by the kernel for Hopper where that serves."""
    (hopper_attention if serves(call) else prefill_attention)(call, inputs, work, num_tokens)


def hopper_attention(
    call: AttentionCall, inputs: StepInputs, work: PrefillWork, num_tokens: int
) -> None:
    """What prefill_attention does, for calls of which `serves` is true."""
    q_THD, kv_pages, page_table_NL, out_THD, scale, span, softcap, kv_scales, sinks_H, _ = call
    num_pages, _, num_kv_heads, page_tokens, width = kv_pages.shape
    codes = Codes.of(LayerPages(kv_pages, kv_scales))
    page_rows = codes.page_stride // width
    padded_width = triton.next_power_of_2(width)
    numbers: str | None = None
    if codes.entry is None:
        num_rows = (num_pages - 1) * page_rows + 2 * num_kv_heads * page_tokens
        box = [page_tokens, PANEL.value]
        pool = TensorDescriptor(kv_pages, [num_rows, width], [width, 1], box, SWIZZLED)
        warps = FETCHING
    else:
        pool = codes.pages.view(torch.int32)
        numbers = numbers_of(codes.entry, "bf16" if q_THD.dtype == torch.bfloat16 else "f16")
        warps = WIDENING[padded_width]
    scale_log2, cap_log2 = score_scale(scale, softcap)
    window, step = window_and_step(span)
    num_tiles = num_items_bound(num_tokens, work.max_rows, work.block_q) * num_kv_heads
    _hopper_attention_kernel[(min(num_tiles, work.num_sms),)](
        pool,
        codes.scales,
        q_THD,
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
        PAGE_ROWS=page_rows,
        PAGE_STRIDE=codes.page_stride // 4,
        SCALE_STRIDE=codes.scale_stride,
        NUMBERS=numbers,
        K=num_kv_heads,
        G=work.group,
        D=width,
        PADDED_D=padded_width,
        P=page_tokens,
        ITEM_Q=work.block_q,
        BLOCK_N=BLOCK_N[padded_width],
        STAGES=STAGES,
        Q_BUFFERS=1 if padded_width == 256 else 2,
        WINDOWED=window > 0,
        STEP=step,
        SHARED=SWIZZLED,
        ATTENDING=warps.attending_registers,
        BRINGING=warps.bringing_registers,
        BRINGING_WARPS=warps.bringing,
        num_warps=4,
        maxnreg=warps.max_registers,
    )
