"""What ranks that share a step's tokens store of them: cache entries of each go to all.

Each rank has stored its own tokens' in its pages. A program copies some of them, as they lie there,
to memory that all ranks read (rank_rows.py), with the slots where they belong, meets the same
program of the others, and copies what these have left there to its own pages. Page tables are the
same on all ranks, so slots are. Numbers and codes of any format are words here.

There is room for two such exchanges, which take turns by the number of a program's meetings: a rank
that is ahead writes to the other one, and to this one only after another meeting.

Shape legend: T tokens of the bucket, N rows of words (heads of tokens), W words of a row, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.kv.kv_entries import Codes
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.ranks.rank_rows import MAX_PROGRAMS, RankMemory, meet
from services.compute.kernels.step.step_buffers import NUM_OWN, NUM_TOKENS

BLOCK_WORDS, WARPS = 4096, 8
"""Of a program at once. 128 such blocks of 16 KiB are on their way across the link."""

SLOT_BYTES, WORD_BYTES = 8, 4

_NUM_OWN, _NUM_TOKENS = tl.constexpr(NUM_OWN), tl.constexpr(NUM_TOKENS)


class StagedEntries(NamedTuple):
    """Where ranks leave entries for one another: for each of two turns slots, then words."""

    staged_R: Tensor  # int64, the address of each rank's
    memory: RankMemory
    max_own: int  # tokens of a rank in an exchange
    token_bytes: int  # of a layer's entries of a token at most, with their scales

    @property
    def turn_bytes(self) -> int:
        return turn_bytes(self.max_own, self.token_bytes)


def turn_bytes(max_own: int, token_bytes: int) -> int:
    """What each of two turns takes."""
    return -(-max_own * (SLOT_BYTES + token_bytes) // 16) * 16


@triton.jit
def _copy(
    pool_ptr, slots_ptr, staged_ptr, staged_slots_ptr, num_own,
    TO_PAGES: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """This program's rows, from pages to where others read them, or from there to pages."""
    word_W = tl.arange(0, PADDED)[None, :]
    num_rows = num_own * HEADS
    for begin in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row_N = begin + tl.arange(0, ROWS)
        there = row_N < num_rows
        slot_N = tl.load(slots_ptr + row_N // HEADS, mask=there, other=0)
        head_N = row_N % HEADS
        place_N = (slot_N // PAGE) * STRIDE + (head_N * PAGE + slot_N % PAGE) * WORDS
        page_NW = pool_ptr + place_N[:, None] + word_W
        staged_NW = staged_ptr + row_N.to(tl.int64)[:, None] * WORDS + word_W
        inside = there[:, None] & (word_W < WORDS)
        if TO_PAGES:
            # past the first cache, where an earlier exchange's may still be
            words = tl.load(staged_NW, mask=inside, other=0, cache_modifier=".cg")
            tl.store(page_NW, words, mask=inside)
        else:
            tl.store(staged_NW, tl.load(page_NW, mask=inside, other=0), mask=inside)
            tl.store(staged_slots_ptr + row_N // HEADS, slot_N, mask=there)


@triton.jit
def _copy_all(
    entries_ptr, scales_ptr, slots_ptr, staged, num_own, TO_PAGES: tl.constexpr,
    HEADS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr,
    SCALES: tl.constexpr, SCALE_STRIDE: tl.constexpr, PAGE: tl.constexpr,
    MAX_OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    staged_slots = staged.to(tl.pointer_type(tl.int64))
    words = tl.multiple_of((staged + MAX_OWN * 8).to(tl.pointer_type(tl.int32)), 16)
    if TO_PAGES:
        slots_ptr = staged_slots
    entries = entries_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    _copy(
        entries, slots_ptr, words, staged_slots, num_own, TO_PAGES,
        HEADS, WORDS, PADDED, PAGE, STRIDE, BLOCK // PADDED,
    )  # fmt: skip
    if scales_ptr is not None:
        scales = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        _copy(
            scales, slots_ptr, words + MAX_OWN * HEADS * WORDS, staged_slots, num_own, TO_PAGES,
            SCALES, 1, 1, PAGE, SCALE_STRIDE, BLOCK // 8,
        )  # fmt: skip


@triton.jit
def _exchange_kernel(
    header_ptr, entries_ptr, scales_ptr, slots_ptr, staged_ptr, memory,
    TURN_BYTES: tl.constexpr, MAX_OWN: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr,
    PADDED: tl.constexpr, STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_own = tl.load(header_ptr + _NUM_OWN)
    if num_own > 0:  # on all ranks or on none
        program = tl.program_id(0)
        turn_at = (tl.load(memory.meetings_P + program) & 1).to(tl.int64) * TURN_BYTES
        own_slots_ptr = slots_ptr + tl.load(header_ptr + _NUM_TOKENS) - num_own
        _copy_all(
            entries_ptr, scales_ptr, own_slots_ptr, tl.load(staged_ptr + memory.rank) + turn_at,
            num_own, False, HEADS, WORDS, PADDED, STRIDE, SCALES, SCALE_STRIDE, PAGE, MAX_OWN,
            BLOCK,
        )  # fmt: skip
        meet(memory, program, RANKS)
        for other in tl.static_range(1, RANKS):
            rank = (memory.rank + other) % RANKS
            _copy_all(
                entries_ptr, scales_ptr, own_slots_ptr, tl.load(staged_ptr + rank) + turn_at,
                num_own, True, HEADS, WORDS, PADDED, STRIDE, SCALES, SCALE_STRIDE, PAGE, MAX_OWN,
                BLOCK,
            )  # fmt: skip


def exchange_entries(
    pages: LayerPages, kv_slots_T: Tensor, header: Tensor, staged: StagedEntries
) -> None:
    """Store what all ranks have alone of the step whose upload begins with this header, in one
    layer's pages; the other ranks do the same.

    `kv_slots_T` (int64) are the slots of this rank's tokens, of which it has the last ones alone.
    """
    _, parts, heads, page_tokens, width = pages.entries.shape
    codes, entry_bytes = Codes.of(pages), pages.entries.element_size()
    words = width * entry_bytes // WORD_BYTES
    assert words * WORD_BYTES == width * entry_bytes and staged.max_own % 2 == 0
    padded = triton.next_power_of_2(words)
    # by the bucket: all ranks launch as many programs
    blocks = triton.cdiv(len(kv_slots_T) * parts * heads * padded, BLOCK_WORDS)
    _exchange_kernel[(min(blocks, MAX_PROGRAMS // 2),)](
        header,
        codes.pages,
        codes.scales,
        kv_slots_T,
        staged.staged_R,
        staged.memory,
        TURN_BYTES=staged.turn_bytes,
        MAX_OWN=staged.max_own,
        HEADS=parts * heads,
        WORDS=words,
        PADDED=padded,
        STRIDE=codes.page_stride * entry_bytes // WORD_BYTES,
        SCALES=heads,
        SCALE_STRIDE=codes.scale_stride,
        PAGE=page_tokens,
        RANKS=len(staged.staged_R),
        BLOCK=BLOCK_WORDS,
        num_warps=WARPS,
    )


def exchange_entries_reference(pages: Sequence[LayerPages], own_slots: Sequence[Tensor]) -> None:
    """The same for all ranks at once, of which each has these slots alone."""
    for source, slots in zip(pages, own_slots, strict=True):
        for target in pages:
            for theirs, mine in zip(source, target, strict=True):
                if theirs is not None and mine is not None:
                    page_tokens = theirs.shape[3]
                    place = slots // page_tokens, slice(None), slice(None), slots % page_tokens
                    mine[place] = theirs[place].clone()
