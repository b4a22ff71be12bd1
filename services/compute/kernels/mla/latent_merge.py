"""One result of a decode row's chunks over latents, in a launch of its own: the mix of a latent is
wide, and the program that ended last would have all heads' mixes to read.

Shape legend: I items, H heads, R width of a latent, C columns of it, S chunks merged at once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from services.compute.kernels.attention.decode_plan import DecodeWork, padded
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.step.step_buffers import AttentionCall


class MergeTiling(NamedTuple):
    """What a program merges: heads in turn, so many columns of so many chunks at once."""

    heads: int
    columns: int
    chunks: int

    @staticmethod
    def of(num_rows: int, num_heads: int, rank: int) -> MergeTiling:
        """Few rows may have hundreds of chunks each, of many rows most have one."""
        if num_rows * num_heads <= FEW_MERGES:
            return MergeTiling(1, min(FEW_COLUMNS, padded(rank)), MANY_CHUNKS)
        heads = 1
        while num_rows * num_heads > heads * MAX_PROGRAMS and num_heads % (2 * heads) == 0:
            heads *= 2
        return MergeTiling(heads, padded(rank), FEW_CHUNKS)


FEW_MERGES = 128
"""Rows times heads, up to which all programs of a quarter of the columns run at once."""

FEW_COLUMNS, MANY_CHUNKS, FEW_CHUNKS = 128, 64, 16
"""Either way a program has 32 KiB in flight."""

MAX_PROGRAMS = 1024
"""64 rows with 16 heads, all cut in four, take 4.0 µs, and 256 rows of one chunk took 3.7 with a
program for each head of each row, which had nothing to do but to begin."""


@triton.jit
def _merge_kernel(
    plan_scratch,  # of the plan: where a row's chunks begin among the items is its second part
    num_items,
    partial,
    partial_stats,
    out_THR,
    OUT_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one row, if it was cut."""
    row = tl.program_id(0)
    begins = plan_scratch + BLOCK_ROWS
    first = tl.load(begins + row, volatile=True)
    is_last = row == BLOCK_ROWS - 1
    after = tl.load(begins + row + 1, mask=row < BLOCK_ROWS - 1, other=0, volatile=True)
    after = tl.where(is_last, tl.load(num_items, volatile=True), after)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if after - first > 1:
        s_S = tl.arange(0, BLOCK_S)
        c_C = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        for turn in tl.static_range(HEADS):
            head = tl.program_id(1) * HEADS + turn
            top = tl.full([1], float("-inf"), tl.float32)
            total = tl.zeros([1], tl.float32)
            mix_C = tl.zeros([BLOCK_C], tl.float32)
            for place in range(first, after, BLOCK_S):
                real_S = place + s_S < after
                stat_S = (place + s_S) * H + head
                top_S = tl.load(partial_stats + stat_S, mask=real_S, other=float("-inf"))
                sum_S = tl.load(partial_stats + MAX_ITEMS * H + stat_S, mask=real_S, other=0.0)
                mix_SC = tl.load(
                    partial + stat_S.to(tl.int64)[:, None] * R + c_C[None, :],
                    mask=real_S[:, None] & (c_C[None, :] < R),
                    other=0.0,
                )
                new_top = tl.maximum(top, tl.max(top_S, axis=0))
                weight_S = tl.exp2(top_S - new_top)
                fade = tl.exp2(top - new_top)
                total = total * fade + tl.sum(sum_S * weight_S, axis=0)
                mix_C = mix_C * fade + tl.sum(mix_SC * weight_S[:, None], axis=0)
                top = new_top
            out = out_THR + row.to(tl.int64) * OUT_ROW + head * R
            tl.store(out + c_C, (mix_C / total).to(out_THR.dtype.element_ty), mask=c_C < R)


def merge_rows(call: AttentionCall, work: DecodeWork, num_rows: int, *, pdl: bool = False) -> None:
    """Make one of the partial results in `work` of each row that was cut.

    With pdl the plan is read above the wait: the launch before must be that of the chunks'
    attention.
    """
    out_THR = call.out_THD
    num_heads, rank = out_THR.shape[1:]
    tiling = MergeTiling.of(num_rows, num_heads, rank)
    grid = (num_rows, num_heads // tiling.heads, triton.cdiv(rank, tiling.columns))
    _merge_kernel[grid](
        work.scratch,
        work.num_items,
        work.partial_IKMD,
        work.partial_stats,
        out_THR,
        OUT_ROW=out_THR.stride(0),
        BLOCK_ROWS=work.scratch.shape[1],
        MAX_ITEMS=len(work.items),
        H=num_heads,
        R=rank,
        HEADS=tiling.heads,
        BLOCK_C=tiling.columns,
        BLOCK_S=tiling.chunks,
        num_warps=4,
        **dependent_launch(pdl, out_THR),
    )
