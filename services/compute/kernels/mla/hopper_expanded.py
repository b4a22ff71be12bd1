"""Attention to keys and values made of latents on Hopper: what latent_prefill does, by the loop of
hopper_attend. An H100 reaches 637 TFLOP/s for a prompt of 4,096 and 16 heads; the plain kernel,
which serves all other devices and heads, 431.

Keys lie side by side in one room and not in pages, so that a copy brings a block's rows. Their last
part, which all heads share, and the queries' are products of their own, added to those of the rest.
Queries' last part is rotated on the way to shared memory, which has room for one tile's queries:
the next tile's are asked for when results have left by way of the same memory.

Shape legend: M rows of a warpgroup, N positions of a block, H heads; of a head C width of what does
not rotate, P of what does, J = P / 2, V of its value, X = C + V.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from services.compute.kernels.attention.hopper_attend import (
    attend_blocks,
    attend_last_values,
    make_barriers,
)
from services.compute.kernels.attention.hopper_fetch import (
    HALF_ROWS,
    PANEL,
    fetch_queries,
    item_at,
    num_rounds,
)
from services.compute.kernels.attention.hopper_prefill import STAGES
from services.compute.kernels.attention.prefill_attention import LOG2_E
from services.compute.kernels.attention.prefill_plan import PrefillWork, num_items_bound
from services.compute.kernels.hopper import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    HOPPER,
    MAX_REGISTERS,
    SWIZZLED,
    boxes,
)
from services.compute.kernels.mla.latent_expansion import StepKeys
from services.compute.kernels.mla.latent_prefill import ChunkQueries, expanded_attention
from services.compute.kernels.step.step_buffers import StepInputs

BLOCK_N = 128  # the order of the sums
HEADS_AT_ONCE = 32
"""Whose keys the L2 cache shall hold: 128 heads took 1,236 µs for a prompt of 4,096 on an H100, 16
or 64 at once 1,304 and 1,270, and all at once 1,578."""
WIDTH = 128  # of a key, so far as it does not rotate, and of a value


@gluon.jit
def _fetch_made_blocks(
    made,
    turned,
    key_parts,
    turned_blocks,
    value_parts,
    barriers,
    begin_R,
    q_start_R,
    q_len_R,
    items_I2,
    num_tiles,
    sizes: gl.constexpr,
):
    """The warp that fetches. What a tile is read from is asked for a tile ahead. Of the last block
    it fetches what lies behind the keys as well."""
    Q_ROW, OUT_ROW, H, HEADS, C, P, V, ITEM_Q, BLOCK_N, STAGES = sizes
    keys_ready, keys_free, values_ready, values_free = barriers
    row, first, head = item_at(items_I2, 0, num_tiles, H, HEADS)
    next_row, next_first, next_head = item_at(items_I2, 1, num_tiles, H, HEADS)
    q_start, q_len = gl.load(q_start_R + row), gl.load(q_len_R + row)
    first_key = gl.load(begin_R + row)
    block = 0
    for step in range(num_rounds(num_tiles)):
        low = first_key
        high = q_start + first + gl.minimum(q_len - first, ITEM_Q)
        column = head * (C + V)
        q_start, q_len = gl.load(q_start_R + next_row), gl.load(q_len_R + next_row)
        first_key = gl.load(begin_R + next_row)
        first, head = next_first, next_head
        next_row, next_first, next_head = item_at(items_I2, step + 2, num_tiles, H, HEADS)
        for start in range(0, high, BLOCK_N):
            # The minimum is `start`. Triton (3.6, 3.7) takes an inner loop's bounds for no use:
            # what an outer loop carries for these alone keeps its first value, the first tile's.
            key = low + gl.minimum(start, high - 1)
            stage = block % STAGES
            phase = block // STAGES & 1 ^ 1
            mbarrier.wait(keys_free.index(stage), phase)
            ready = keys_ready.index(stage)
            mbarrier.expect(ready, BLOCK_N * (C + P) * 2)
            for panel in gl.static_range(C // PANEL):
                part = key_parts.index(stage * (C // PANEL) + panel)
                tma.async_copy_global_to_shared(made, [key, column + panel * PANEL], ready, part)
            tma.async_copy_global_to_shared(turned, [key, 0], ready, turned_blocks.index(stage))
            mbarrier.wait(values_free.index(stage), phase)
            ready = values_ready.index(stage)
            mbarrier.expect(ready, BLOCK_N * V * 2)
            for panel in gl.static_range(V // PANEL):
                part = value_parts.index(stage * (V // PANEL) + panel)
                at = column + C + panel * PANEL
                tma.async_copy_global_to_shared(made, [key, at], ready, part)
            block += 1


@gluon.jit
def _load_turning(
    q_THD, cos_PJ, sin_PJ, token, num_q, position, head, Q_ROW: gl.constexpr, C: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Ask for what is to be rotated of a warpgroup's queries, its halves, and for their angles."""
    J: gl.constexpr = P // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // J, J // 8], [4, 1], [1, 0])
    row_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    j_J = gl.arange(0, J, layout=gl.SliceLayout(0, layout))[None, :]
    valid_M = (row_M < num_q)[:, None]
    at_M = (token + row_M).to(gl.int64) * Q_ROW + head * (C + P) + C
    first_MJ = gl.load(q_THD + at_M[:, None] + j_J, mask=valid_M, other=0.0)
    second_MJ = gl.load(q_THD + at_M[:, None] + J + j_J, mask=valid_M, other=0.0)
    angle_MJ = (position + row_M)[:, None] * J + j_J
    cos_MJ = gl.load(cos_PJ + angle_MJ, mask=valid_M, other=0.0)
    sin_MJ = gl.load(sin_PJ + angle_MJ, mask=valid_M, other=0.0)
    return first_MJ, second_MJ, cos_MJ, sin_MJ


@gluon.jit
def _turn(buffer, turning):
    first_MJ, second_MJ, cos_MJ, sin_MJ = turning
    dtype: gl.constexpr = buffer.dtype
    first_MJ, second_MJ = first_MJ.to(gl.float32), second_MJ.to(gl.float32)
    turned_first_MJ = first_MJ * cos_MJ - second_MJ * sin_MJ
    turned_second_MJ = second_MJ * cos_MJ + first_MJ * sin_MJ
    q_MJ2 = gl.join(turned_first_MJ.to(dtype), turned_second_MJ.to(dtype))
    buffer.store(q_MJ2.permute(0, 2, 1).reshape(buffer.shape))


@gluon.jit
def _attend(HALF: gl.constexpr, operands, places, scale_log2, sizes: gl.constexpr):
    """A warpgroup: the first or the second half of each item's queries."""
    q_buffers, turned_buffers, blocks, barriers, q_THD, cos_PJ, sin_PJ, out_THV = operands
    q_start_R, q_len_R, token_start_R, items_I2, num_tiles = places
    Q_ROW, OUT_ROW, H, HEADS, C, P, V, ITEM_Q, BLOCK_N, STAGES = sizes
    loop: gl.constexpr = (HALF_ROWS, BLOCK_N, BLOCK_N, STAGES, False, 1)
    FIRST: gl.constexpr = HALF * HALF_ROWS
    dtype: gl.constexpr = q_THD.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    query_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, scores))
    line_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, lines))
    v_V = gl.arange(0, V, layout=gl.SliceLayout(0, lines))
    q_MC, q_MP = q_buffers.index(HALF), turned_buffers.index(HALF)

    row, first, head = item_at(items_I2, 0, num_tiles, H, HEADS)
    next_row, next_first, next_head = item_at(items_I2, 1, num_tiles, H, HEADS)
    q_start, q_len = gl.load(q_start_R + row), gl.load(q_len_R + row)
    q_len = gl.where(num_tiles > 0, q_len, 0)  # of no step's row
    token_start = gl.load(token_start_R + row)
    token, num_q = token_start + first + FIRST, q_len - first - FIRST
    fetch_queries(q_MC, q_THD, token, num_q, head, Q_ROW, 1, C + P, C)
    _turn(
        q_MP,
        _load_turning(
            q_THD, cos_PJ, sin_PJ, token, num_q, q_start + first + FIRST, head, Q_ROW, C, P
        ),
    )
    block = 0
    for step in range(num_rounds(num_tiles)):
        high = q_start + first + gl.minimum(q_len - first, ITEM_Q)
        first_position = q_start + first + FIRST
        this_token, this_num_q, this_head = token, num_q, head
        # The next tile's place is known by now, and the place of the one after it is asked for.
        q_start, q_len = gl.load(q_start_R + next_row), gl.load(q_len_R + next_row)
        token_start = gl.load(token_start_R + next_row)
        first, head = next_first, next_head
        next_row, next_first, next_head = item_at(items_I2, step + 2, num_tiles, H, HEADS)
        token, num_q = token_start + first + FIRST, q_len - first - FIRST

        async_copy.wait_group(0)
        fence_async_shared()
        acc_MV, weight_MN, max_M, sum_M, block = attend_blocks(
            q_MC, q_MP, blocks, barriers, block, 0, high, first_position,
            first_position + query_M, (0, scale_log2, None), loop,
        )  # fmt: skip
        turning = _load_turning(
            q_THD, cos_PJ, sin_PJ, token, num_q, q_start + first + FIRST, head, Q_ROW, C, P
        )
        acc_MV = attend_last_values(acc_MV, weight_MN, blocks, barriers, block, 0, high, loop)
        block += 1
        _turn(q_MP, turning)

        sum_M = gl.where(query_M < this_num_q, sum_M, 1.0)  # where there are no queries are no sums
        acc_MV *= gl.convert_layout(1.0 / sum_M, gl.SliceLayout(1, sums))[:, None]
        q_MC.store(acc_MV.to(dtype))  # by way of where the queries were, so as to write whole lines
        at_M = (this_token + line_M).to(gl.int64) * OUT_ROW + this_head * V
        out_ptr = out_THV + at_M[:, None] + v_V[None, :]
        gl.store(out_ptr, q_MC.load(lines), mask=(line_M < this_num_q)[:, None])
        fetch_queries(q_MC, q_THD, token, num_q, head, Q_ROW, 1, C + P, C)


@gluon.jit
def _hopper_expanded_kernel(
    made,
    turned,
    q_THD,
    cos_PJ,
    sin_PJ,
    begin_R,
    q_start_R,
    q_len_R,
    token_start_R,
    items_I2,
    num_items_ptr,
    out_THV,
    scale_log2,
    Q_ROW: gl.constexpr,
    OUT_ROW: gl.constexpr,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    C: gl.constexpr,
    P: gl.constexpr,
    V: gl.constexpr,
    ITEM_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    ATTENDING: gl.constexpr,
    FETCHING: gl.constexpr,
):
    dtype: gl.constexpr = q_THD.dtype.element_ty
    q_buffers = gl.allocate_shared_memory(dtype, [2, HALF_ROWS, C], SHARED)
    turned_buffers = gl.allocate_shared_memory(dtype, [2, HALF_ROWS, P], SHARED)
    key_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, C], SHARED)
    turned_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, P], SHARED)
    value_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, V], SHARED)
    # The same bytes as a copy fills them: a block's rows in one panel of columns.
    key_parts = key_blocks._reinterpret(dtype, [STAGES * (C // PANEL), BLOCK_N, PANEL], SHARED)
    value_parts = value_blocks._reinterpret(dtype, [STAGES * (V // PANEL), BLOCK_N, PANEL], SHARED)
    barriers = make_barriers(STAGES)
    num_tiles = gl.load(num_items_ptr) * H
    blocks = (key_blocks, turned_blocks, value_blocks, value_parts)
    operands = (q_buffers, turned_buffers, blocks, barriers, q_THD, cos_PJ, sin_PJ, out_THV)
    places = (q_start_R, q_len_R, token_start_R, items_I2, num_tiles)
    sizes: gl.constexpr = (Q_ROW, OUT_ROW, H, HEADS, C, P, V, ITEM_Q, BLOCK_N, STAGES)
    gl.warp_specialize(
        [
            (_attend, (0, operands, places, scale_log2, sizes)),
            (_attend, (1, operands, places, scale_log2, sizes)),
            (
                _fetch_made_blocks,
                (
                    made, turned, key_parts, turned_blocks, value_parts, barriers, begin_R,
                    q_start_R, q_len_R, items_I2, num_tiles, sizes,
                ),
            ),
        ],
        [4, 1],
        [ATTENDING, FETCHING],
    )  # fmt: skip


def serves(chunks: ChunkQueries, keys: StepKeys) -> bool:
    """Whether this device and these heads are what the kernel is written for."""
    q_THD, out_THV = chunks.q_THD, chunks.out_THV
    rotated, width = keys.turned_KP.shape[1], out_THV.shape[2]
    return (
        q_THD.is_cuda
        and torch.cuda.get_device_capability(q_THD.device) == HOPPER
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and rotated == PANEL.value
        and q_THD.shape[2] - rotated == width == WIDTH
        and q_THD.stride(0) % 8 == out_THV.stride(0) % 8 == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q_THD, out_THV))
    )


def expanded_chunk_attention(
    chunks: ChunkQueries, keys: StepKeys, inputs: StepInputs, work: PrefillWork, num_tokens: int
) -> None:
    """Attention of every planned query, by the kernel for Hopper where that serves."""
    attend = hopper_expanded_attention if serves(chunks, keys) else expanded_attention
    attend(chunks, keys, inputs, work, num_tokens)


def hopper_expanded_attention(
    chunks: ChunkQueries,
    keys: StepKeys,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
) -> None:
    """What expanded_attention does, for calls of which `serves` is true."""
    q_THD, tables, out_THV, scale = chunks
    _, heads, query_dim = q_THD.shape
    rotated, width = keys.turned_KP.shape[1], out_THV.shape[2]
    num_tiles = num_items_bound(num_tokens, work.max_rows, work.block_q) * heads

    _hopper_expanded_kernel[(min(num_tiles, work.num_sms),)](
        boxes(keys.expanded_KHX.flatten(1), BLOCK_N, PANEL.value),
        boxes(keys.turned_KP, BLOCK_N, PANEL.value),
        q_THD,
        tables.cos_PJ,
        tables.sin_PJ,
        keys.begin_R,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        work.items_I2,
        work.num_items,
        out_THV,
        scale * LOG2_E,
        Q_ROW=q_THD.stride(0),
        OUT_ROW=out_THV.stride(0),
        H=heads,
        HEADS=math.gcd(heads, HEADS_AT_ONCE),
        C=query_dim - rotated,
        P=rotated,
        V=width,
        ITEM_Q=work.block_q,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        SHARED=SWIZZLED,
        ATTENDING=ATTENDING_REGISTERS,
        FETCHING=FETCHING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
