"""Sums over the ranks of a split model, through memory that all of them can read.

Each rank has one block of such memory (distributed/symmetric.py). Programs of one number meet: each
writes the number of the meeting, which it counts itself, to its place in all ranks' pads, and waits
until all have written to its own. So a meeting takes one write across the link, two ranks that
replay the same graphs need no host, and nothing has to be cleared.

- `rank_sum` is for a launch that has other work with the row (add_norm): it reads the rows of all
  ranks. The next sum's rows lie elsewhere, so a rank that is ahead overwrites nothing: it gets to
  these again after another meeting, which the slower one reaches when it has read them.
- `add_up` is for many rows: each rank adds a part of them and writes the sums to all (two-shot).
- `side_by_side` is for logits: each rank reads the others' parts of the vocabulary.
- `share_best` is for draws that need no logits of others: 8 bytes a row are read of each rank.

Sums are added in float32 as a tree (tree_sum.py) and rounded once, here or where they are added to
the residual stream: the same bits on all ranks.

Shape legend: T tokens, E hidden width, R ranks, P programs that meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.ranks.add_to_tree import add_to_tree
from services.compute.kernels.ranks.tree_sum import tree_sum
from services.compute.kernels.sampling.sample import NO_ID, SampleScratch

MAX_PROGRAMS = 256
"""That may meet: programs of a launch, or rows of one that has a program for each."""

ADD_BLOCK, ADD_WARPS = 4096, 8
GATHER_BLOCK, GATHER_WARPS = 2048, 8


class RankMemory(NamedTuple):
    """Where the ranks meet."""

    rank: int
    pads_R: Tensor  # int64, the address of each rank's pads: int32 [P, R]
    meetings_P: Tensor  # int32, of this rank's programs so far


class RankRows(NamedTuple):
    """Rows [T, E] of which each rank has a summand."""

    own_TE: Tensor
    rows_R: Tensor  # int64, the address of each rank's
    memory: RankMemory


@triton.jit
def meet(memory, place, RANKS: tl.constexpr):
    """Wait until this program of all ranks is here; what each has written before is visible."""
    ranks = tl.arange(0, RANKS)
    number = tl.load(memory.meetings_P + place) + 1
    theirs = tl.load(memory.pads_R + ranks).to(tl.pointer_type(tl.int32))
    mine = tl.load(memory.pads_R + memory.rank).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # all threads have written, and have read the number
    tl.store(memory.meetings_P + place, number)
    place_of_mine = theirs + place * RANKS + memory.rank
    tl.atomic_xchg(place_of_mine, tl.zeros([RANKS], tl.int32) + number, sem="release", scope="sys")
    seen = mine + place * RANKS + ranks
    none = tl.zeros([RANKS], tl.int32)
    # by the difference: the number may wrap
    behind = tl.min(tl.atomic_add(seen, none, sem="acquire", scope="sys") - number, axis=0)
    while behind < 0:
        behind = tl.min(tl.atomic_add(seen, none, sem="acquire", scope="sys") - number, axis=0)
    tl.debug_barrier()


@triton.jit
def rank_sum(rows_ptr, offsets, inside, dtype: tl.constexpr, RANKS: tl.constexpr):
    """The float32 sum over ranks of the elements at these offsets."""
    total = tl.zeros(offsets.shape, tl.float32)
    one = total
    two = total
    four = total
    for rank in tl.static_range(RANKS):
        row_ptr = tl.multiple_of(tl.load(rows_ptr + rank).to(tl.pointer_type(dtype)), 16)
        # past the first cache, where an earlier sum's rows may still be
        summand = tl.load(row_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        part, one, two, four = add_to_tree(summand.to(tl.float32), one, two, four, rank)
        if rank % 8 == 7 or rank == RANKS - 1:
            total = part if rank < 8 else total + part
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _add_up_kernel(
    own_ptr, rows_ptr, memory, num_rows, E: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = own_ptr.dtype.element_ty
    program = tl.program_id(0)
    meet(memory, program, RANKS)
    num_elements = num_rows * E
    num_blocks = tl.cdiv(num_elements, BLOCK)
    first = program * RANKS + memory.rank
    for block in range(first, num_blocks, tl.num_programs(0) * RANKS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        total = rank_sum(rows_ptr, offsets, inside, dtype, RANKS).to(dtype)
        for rank in tl.static_range(RANKS):
            row_ptr = tl.multiple_of(tl.load(rows_ptr + rank).to(tl.pointer_type(dtype)), 16)
            tl.store(row_ptr + offsets, total, mask=inside)
    meet(memory, program, RANKS)


def add_up(rows: RankRows) -> None:
    """Replace every rank's rows by their sum; they have at most 2^31 elements."""
    own_TE, rows_R, memory = rows
    num_rows, width = own_TE.shape
    num_ranks = len(rows_R)
    programs = min(triton.cdiv(own_TE.numel(), ADD_BLOCK * num_ranks), MAX_PROGRAMS // 2)
    _add_up_kernel[(programs,)](
        own_TE,
        rows_R,
        memory,
        num_rows,
        E=width,
        RANKS=num_ranks,
        BLOCK=ADD_BLOCK,
        num_warps=ADD_WARPS,
    )


@triton.jit
def _copy_part(
    part_ptr, out_ptr, num_rows,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part_ptr = tl.multiple_of(part_ptr.to(tl.pointer_type(out_ptr.dtype.element_ty)), 16)
    pieces: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for piece in range(tl.program_id(0), num_rows * pieces, tl.num_programs(0)):
        row = (tl.zeros([1], tl.int64) + piece) // pieces
        columns = piece % pieces * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        place = part_ptr + row * WIDTH + columns
        values = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(out_ptr + row * V + BEGIN + columns, values, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _side_by_side_kernel(
    parts_ptr, out_ptr, memory, num_rows,
    BEGINS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    meet(memory, tl.program_id(0), RANKS)
    for rank in tl.static_range(RANKS):
        if BEGINS[rank] < BEGINS[rank + 1]:
            _copy_part(
                tl.load(parts_ptr + rank), out_ptr, num_rows,
                BEGINS[rank], BEGINS[rank + 1] - BEGINS[rank], BEGINS[RANKS], BLOCK,
            )  # fmt: skip
    meet(memory, tl.program_id(0), RANKS)


def side_by_side(
    parts_R: Tensor, begins: tuple[int, ...], out_SV: Tensor, memory: RankMemory
) -> None:
    """All ranks' contiguous parts next to one another, in `out`.

    `parts_R` (int64) are their addresses; rank r's are columns begins[r] to begins[r + 1] of `out`,
    which may be none.
    """
    num_rows, width = out_SV.shape
    assert begins[-1] == width and out_SV.is_contiguous()
    programs = min(num_rows * triton.cdiv(width, GATHER_BLOCK), MAX_PROGRAMS // 2)
    _side_by_side_kernel[(programs,)](
        parts_R,
        out_SV,
        memory,
        num_rows,
        BEGINS=begins,
        RANKS=len(parts_R),
        BLOCK=GATHER_BLOCK,
        num_warps=GATHER_WARPS,
    )


@triton.jit
def _share_best_kernel(
    scratch, words_ptr, memory, C: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    part = tl.arange(0, LANES)
    there = part < PARTS
    place = sample * C + part
    best = tl.load(scratch.best_SC + place, mask=there, other=-float("inf"))
    best_id = tl.load(scratch.best_id_SC + place, mask=there, other=NO_ID)
    broken = tl.max(tl.load(scratch.broken_SC + place, mask=there, other=0), axis=0)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_id, NO_ID), axis=0)
    turn = tl.load(memory.meetings_P + sample) & 1
    offset = 4 * sample + 2 * turn
    mine = tl.load(words_ptr + memory.rank).to(tl.pointer_type(tl.int32)) + offset
    tl.store(mine, top.to(tl.int32, bitcast=True))
    tl.store(mine + 1, token | (broken << 31))
    meet(memory, sample, RANKS)
    rank = tl.arange(0, RANKS)
    theirs = tl.load(words_ptr + rank).to(tl.pointer_type(tl.int32)) + offset
    top_R = tl.load(theirs, cache_modifier=".cg").to(tl.float32, bitcast=True)
    token_R = tl.load(theirs + 1, cache_modifier=".cg")
    tl.store(scratch.best_SC + sample * C + rank, top_R)
    tl.store(scratch.best_id_SC + sample * C + rank, token_R & NO_ID)
    tl.store(scratch.broken_SC + sample * C + rank, (token_R < 0).to(tl.int32))


def share_best(
    words_R: Tensor, scratch: SampleScratch, num_samples: int, num_parts: int, memory: RankMemory
) -> int:
    """Replace the bests of so many samples' parts here by those of all ranks; returns their number.

    `words_R` (int64) are the addresses of each rank's words, int32 [S, 4], for up to `MAX_PROGRAMS`
    samples: two of a meeting and two of the next, which a rank that is ahead may have begun.
    """
    assert num_samples <= MAX_PROGRAMS
    _share_best_kernel[(num_samples,)](
        scratch,
        words_R,
        memory,
        C=scratch.best_SC.shape[1],
        PARTS=num_parts,
        LANES=triton.next_power_of_2(num_parts),
        RANKS=len(words_R),
        num_warps=1,
    )
    return len(words_R)


@triton.jit
def _meet_kernel(memory, RANKS: tl.constexpr):
    meet(memory, tl.program_id(0), RANKS)


def meet_ranks(memory: RankMemory, num_ranks: int) -> None:
    """Whatever is launched behind it sees what all ranks have written before theirs."""
    _meet_kernel[(1,)](memory, RANKS=num_ranks, num_warps=1)


def rank_sum_reference(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what each rank has, rounded once."""
    return tree_sum(parts).to(parts[0].dtype)
