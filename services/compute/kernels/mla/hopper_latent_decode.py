"""Decode attention over latents on Hopper, scheduled after FlashMLA (Li and Liu, 2025).

A tile is up to 64 heads of one query, which see a block of 64 latents at a time. One warp has the
copy engine bring blocks into a ring of two. Two warpgroups own the blocks in turn: the owner makes
a block's scores and weights, and both multiply the weights with their half of the latents' columns,
so that a block is read once from memory and the sums of 64 heads fit the registers of both. While
one warpgroup weighs scores, products of the other run. In Gluon, for the reasons that
hopper_prefill has.

Shape legend: M heads of a tile, N latents of a block, C columns of half a latent, R width of a
latent, P of the rotated part, I items, H heads.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.compute.kernels.attention.decode_plan import DecodeWork
from services.compute.kernels.attention.prefill_attention import LOG2_E
from services.compute.kernels.hopper import (
    ATTENDING_REGISTERS,
    FETCHING_REGISTERS,
    HOPPER,
    MAX_REGISTERS,
    SWIZZLED,
)
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.mla.hopper_latent_blocks import (
    begin_others,
    begin_scores,
    multiply_own,
    publish,
    weigh,
)
from services.compute.kernels.mla.hopper_latent_fetch import (
    BLOCK_N,
    fetch_latents,
    fetch_queries,
    load_place,
    num_blocks_of,
)
from services.compute.kernels.mla.latent_attention import latent_decode_attention
from services.compute.kernels.mla.latent_merge import merge_rows
from services.compute.kernels.mla.latent_tiling import head_tiles
from services.compute.kernels.step.step_buffers import AttentionCall, page_stride

TILE_HEADS = gl.constexpr(64)  # rows of a matrix instruction
FEW_HEADS = 32
"""Heads of a tile up to which latent_decode_attention serves. On an H100 64 rows of 4,096 tokens
take 185 µs here and 277 there with 128 heads, which are two tiles, and 129 and 120 with 16. What is
between has not been timed: from 33 heads on more than half of a tile's rows are heads."""

RANK = 512  # a latent's width in all models that there are


@gluon.jit
def _store_lines(buffer, out, acc_MC, G: gl.constexpr, R: gl.constexpr):
    """Results, by way of where the queries were, so as to write whole lines."""
    C: gl.constexpr = acc_MC.shape[1]
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    buffer.store(acc_MC.to(buffer.dtype))
    g_M = gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, lines))
    c_C = gl.arange(0, C, layout=gl.SliceLayout(0, lines))
    gl.store(out + g_M[:, None] * R + c_C[None, :], buffer.load(lines), mask=(g_M < G)[:, None])


@gluon.jit
def _store_sums(out, acc_MC, G: gl.constexpr, R: gl.constexpr):
    layout: gl.constexpr = acc_MC.type.layout
    g_M = gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, layout))
    c_C = gl.arange(0, acc_MC.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(out + g_M[:, None] * R + c_C[None, :], acc_MC, mask=(g_M < G)[:, None])


@gluon.jit
def _store_stats(tops, totals, max_M, sum_M, G: gl.constexpr):
    g_M = gl.arange(0, TILE_HEADS, layout=max_M.type.layout)
    gl.store(tops + g_M, max_M, mask=g_M < G)
    gl.store(totals + g_M, sum_M, mask=g_M < G)


@gluon.jit
def _attend(HALF: gl.constexpr, shared, barriers, parts, tensors, scale_log2, sizes: gl.constexpr):
    """A warpgroup: owner of every other block, and of half of the columns."""
    q_halves, q_turned, stats = shared[0], shared[1], shared[4]
    rest_free, met = barriers[3], barriers[5]
    q_THW, out_THR, partial, partial_stats, items, num_items = tensors
    Q_ROW, OUT_ROW, MAX_ITEMS, H, G, R, P, BOX = sizes
    C: gl.constexpr = R // 2
    TILES: gl.constexpr = H // G
    OTHER: gl.constexpr = 1 - HALF
    dtype: gl.constexpr = q_THW.dtype.element_ty
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    by_score: gl.constexpr = gl.SliceLayout(1, scores)
    zeros_MN = gl.zeros([TILE_HEADS, BLOCK_N], gl.float32, layout=scores)
    own_phase = 0  # of barriers of this warpgroup's blocks, and of the other one's
    other_phase = 0
    meeting = 0
    num_units = gl.load(num_items) * TILES
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        item, tile = unit // TILES, unit % TILES
        row, _, start, end, length, place = load_place(items, item)
        num_blocks = num_blocks_of(start, end)
        fetch_queries(
            HALF, q_halves, q_turned, q_THW + row.to(gl.int64) * Q_ROW + tile * (G * (R + P)), G,
            R, P,
        )  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(met.index(0), count=1)
        mbarrier.wait(met.index(0), meeting)

        max_M = gl.full([TILE_HEADS], float("-inf"), gl.float32, layout=by_score)
        sum_M = gl.zeros([TILE_HEADS], gl.float32, layout=by_score)
        acc_MC = gl.zeros([TILE_HEADS, C], gl.float32, layout=sums)
        if HALF == 0:
            score_MN = begin_scores(HALF, shared, barriers, own_phase, zeros_MN, 0)
            score_MN = warpgroup_mma_wait(0, deps=[score_MN])
            weight_MN, max_M, decay_M = weigh(score_MN, max_M, start, end, scale_log2, scores)
            sum_M = gl.sum(weight_MN, axis=1)
            weight_MN = weight_MN.to(dtype)
            publish(HALF, shared, barriers, weight_MN, max_M, decay_M)
            acc_MC = multiply_own(
                HALF, shared, barriers, parts, start, end, weight_MN, decay_M, acc_MC, BOX, sums, 0
            )  # fmt: skip
            own_phase ^= 1
        else:
            acc_MC = warpgroup_mma_wait(0, deps=[acc_MC])
        for block in range(2 - HALF, num_blocks, 2):
            at = start + block * BLOCK_N
            # 0, but the compiler does not know: else it makes the descriptors of all operands in
            # front of the loop, for which there are no registers, and 185 µs are 206.
            zero = block >> 24
            score_MN = begin_scores(HALF, shared, barriers, own_phase, zeros_MN, zero)
            acc_MC, max_M, other_decay_M = begin_others(
                HALF, shared, barriers, parts, other_phase, at - BLOCK_N, end, acc_MC, BOX, sums,
                scores, zero,
            )  # fmt: skip
            score_MN = warpgroup_mma_wait(1, deps=[score_MN])
            weight_MN, max_M, decay_M = weigh(score_MN, max_M, at, end, scale_log2, scores)
            sum_M = sum_M * (other_decay_M * decay_M) + gl.sum(weight_MN, axis=1)
            weight_MN = weight_MN.to(dtype)
            publish(HALF, shared, barriers, weight_MN, max_M, decay_M)
            acc_MC = warpgroup_mma_wait(0, deps=[acc_MC])
            mbarrier.arrive(rest_free.index(OTHER), count=1)
            acc_MC = multiply_own(
                HALF, shared, barriers, parts, at, end, weight_MN, decay_M, acc_MC, BOX, sums,
                zero,
            )  # fmt: skip
            own_phase ^= 1
            other_phase ^= 1
        if num_blocks % 2 == HALF:  # the last block is the other one's
            at = start + (num_blocks - 1) * BLOCK_N
            acc_MC, max_M, decay_M = begin_others(
                HALF, shared, barriers, parts, other_phase, at, end, acc_MC, BOX, sums, scores, 0
            )
            acc_MC = warpgroup_mma_wait(0, deps=[acc_MC])
            mbarrier.arrive(rest_free.index(OTHER), count=1)
            sum_M *= decay_M
            other_phase ^= 1

        stats.index(4 + HALF).store(sum_M)
        mbarrier.arrive(met.index(1), count=1)
        mbarrier.wait(met.index(1), meeting)
        meeting ^= 1
        sum_M += stats.index(4 + OTHER).load(by_score)
        if length <= end - start:
            acc_MC *= gl.convert_layout(1.0 / sum_M, gl.SliceLayout(1, sums))[:, None]
            out = out_THR + row.to(gl.int64) * OUT_ROW + tile * (G * R) + HALF * C
            _store_lines(q_halves.index(HALF), out, acc_MC, G, R)
        else:
            at = place * H + tile * G
            _store_sums(partial + at.to(gl.int64) * R + HALF * C, acc_MC, G, R)
            if HALF == 0:
                _store_stats(
                    partial_stats + at, partial_stats + MAX_ITEMS * H + at, max_M, sum_M, G
                )


@gluon.jit
def _hopper_latents_kernel(
    pool,
    q_THW,
    page_table,
    items,
    num_items,
    partial,  # [I, H, R]
    partial_stats,  # [2, I, H]
    out_THR,
    scale_log2,
    Q_ROW: gl.constexpr,
    OUT_ROW: gl.constexpr,
    TABLE_ROW: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    MAX_ITEMS: gl.constexpr,
    H: gl.constexpr,
    G: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,
    SHARED: gl.constexpr,
    ATTENDING: gl.constexpr,
    FETCHING: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q_THW.dtype.element_ty
    C: gl.constexpr = R // 2
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    BOXES: gl.constexpr = BLOCK_N // BOX
    q_halves = gl.allocate_shared_memory(dtype, [2, TILE_HEADS, C], SHARED)
    q_turned = gl.allocate_shared_memory(dtype, [TILE_HEADS, P], SHARED)
    latents = gl.allocate_shared_memory(dtype, [4, BLOCK_N, C], SHARED)  # halves of two blocks
    turned = gl.allocate_shared_memory(dtype, [2, BLOCK_N, P], SHARED)
    # The same bytes as a copy fills them: rows of a page in one panel of columns.
    latent_parts = latents._reinterpret(dtype, [4 * (C // 64) * BOXES, BOX, 64], SHARED)
    turned_parts = turned._reinterpret(dtype, [2 * (P // 64) * BOXES, BOX, 64], SHARED)
    stats = gl.allocate_shared_memory(
        gl.float32, [6, TILE_HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # the greatest scores, the decays and the sums of both
    own_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    rest_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    own_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    rest_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    met = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    for stage in gl.static_range(2):
        mbarrier.init(own_ready.index(stage), count=1)
        mbarrier.init(rest_ready.index(stage), count=1)
        mbarrier.init(own_free.index(stage), count=1)
        mbarrier.init(rest_free.index(stage), count=1)
        mbarrier.init(weighed.index(stage), count=1)
        mbarrier.init(met.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    shared = (q_halves, q_turned, latents, turned, stats)
    barriers = (own_ready, rest_ready, own_free, rest_free, weighed, met)
    tensors = (q_THW, out_THR, partial, partial_stats, items, num_items)
    sizes: gl.constexpr = (Q_ROW, OUT_ROW, MAX_ITEMS, H, G, R, P, BOX)
    gl.warp_specialize(
        [
            (_attend, (0, shared, barriers, latent_parts, tensors, scale_log2, sizes)),
            (_attend, (1, shared, barriers, latent_parts, tensors, scale_log2, sizes)),
            (
                fetch_latents,
                (
                    pool, latent_parts, turned_parts, barriers[:4], page_table, items, num_items,
                    TABLE_ROW, PAGE_ROWS, H // G, PAGE, BOX, C, P,
                ),
            ),
        ],
        [4, 1],
        [ATTENDING, FETCHING],
    )  # fmt: skip


def serves(call: AttentionCall) -> bool:
    """Whether this device, these heads and these entries are what the kernel is written for."""
    q_THW, pages, _, out_THR = call[:4]
    num_heads, rank = out_THR.shape[1:]
    page_tokens, width = pages.shape[3:]
    return (
        q_THW.is_cuda
        and torch.cuda.get_device_capability(q_THW.device) == HOPPER
        and q_THW.dtype in (torch.bfloat16, torch.float16)
        and call.kv_scales is None
        and num_heads // head_tiles(num_heads) > FEW_HEADS
        and rank == RANK
        and width - rank == BLOCK_N.value  # weights lie where rotated parts were
        and page_tokens in (8, 16, 32, 64, 128)
        and page_stride(pages) % width == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q_THW, pages, out_THR))
        and q_THW.stride(0) % 8 == out_THR.stride(0) % 8 == 0
    )


def latent_row_attention(
    call: AttentionCall, work: DecodeWork, num_rows: int, *, pdl: bool = False
) -> None:
    """Attention of the step's decode rows, by the kernel for Hopper where that serves."""
    attention = hopper_latent_attention if serves(call) else latent_decode_attention
    attention(call, work, num_rows, pdl=pdl)


def hopper_latent_attention(
    call: AttentionCall, work: DecodeWork, num_rows: int, *, pdl: bool = False
) -> None:
    """What latent_decode_attention does, for calls of which `serves` is true; nothing is read above
    the wait of a dependent launch."""
    q_THW, pages, page_table_NL, out_THR, scale = call[:5]
    num_heads, rank = out_THR.shape[1:]
    num_pages, _, _, page_tokens, width = pages.shape
    tiles = head_tiles(num_heads)
    page_rows = page_stride(pages) // width
    pool_rows = (num_pages - 1) * page_rows + page_tokens
    box = min(page_tokens, BLOCK_N.value)
    num_sms = torch.cuda.get_device_properties(q_THW.device).multi_processor_count
    _hopper_latents_kernel[(min(tiles * work.item_limit(num_rows), num_sms),)](
        TensorDescriptor(pages, [pool_rows, width], [width, 1], [box, 64], SWIZZLED),
        q_THW,
        page_table_NL,
        work.items,
        work.num_items,
        work.partial_IKMD,
        work.partial_stats,
        out_THR,
        scale * LOG2_E,
        Q_ROW=q_THW.stride(0),
        OUT_ROW=out_THR.stride(0),
        TABLE_ROW=page_table_NL.stride(0),
        PAGE_ROWS=page_rows,
        MAX_ITEMS=len(work.items),
        H=num_heads,
        G=num_heads // tiles,
        R=rank,
        P=width - rank,
        PAGE=page_tokens,
        BOX=box,
        SHARED=SWIZZLED,
        ATTENDING=ATTENDING_REGISTERS,
        FETCHING=FETCHING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(pdl, q_THW),
    )
    merge_rows(call, work, num_rows, pdl=pdl)
