"""What threads do each for themselves: counts of 32 numbers by votes, and stores here and there.

A warp's lanes each count one number, in a third of the instructions of `tl.histogram`, whose tests
of bits the compiler packs and unpacks. Scattered stores leave values where they are, which the
compiler would move to other threads first.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_LANES = 32

LANES = tl.constexpr(NUM_LANES)
INTERPRETED = triton.knobs.runtime.interpret
# Of 32 lanes' numbers, in bits 20 to 24: how many are this lane's own. A vote on a bit, turned over
# where the lane has that bit not set, leaves those that agree with it.
_VOTE = tl.constexpr("""
{
.reg .pred p0, p1, p2, p3, p4;
.reg .b32 lane, b, m, v, mine;
mov.u32 lane, %laneid;
and.b32 b, $1, 0x100000;
setp.ne.u32 p0, b, 0;
and.b32 b, $1, 0x200000;
setp.ne.u32 p1, b, 0;
and.b32 b, $1, 0x400000;
setp.ne.u32 p2, b, 0;
and.b32 b, $1, 0x800000;
setp.ne.u32 p3, b, 0;
and.b32 b, $1, 0x1000000;
setp.ne.u32 p4, b, 0;
vote.sync.ballot.b32 mine, p0, -1;
and.b32 m, lane, 1;
sub.u32 m, m, 1;
xor.b32 mine, mine, m;
vote.sync.ballot.b32 v, p1, -1;
bfe.u32 m, lane, 1, 1;
sub.u32 m, m, 1;
lop3.b32 mine, v, m, mine, 0x28;
vote.sync.ballot.b32 v, p2, -1;
bfe.u32 m, lane, 2, 1;
sub.u32 m, m, 1;
lop3.b32 mine, v, m, mine, 0x28;
vote.sync.ballot.b32 v, p3, -1;
bfe.u32 m, lane, 3, 1;
sub.u32 m, m, 1;
lop3.b32 mine, v, m, mine, 0x28;
vote.sync.ballot.b32 v, p4, -1;
bfe.u32 m, lane, 4, 1;
sub.u32 m, m, 1;
lop3.b32 mine, v, m, mine, 0x28;
popc.b32 $0, mine;
}
""")


@triton.jit
def no_counts(COLUMNS: tl.constexpr, FAST: tl.constexpr):
    """What counts begin with: of each lane's number, in columns that are added up in the end."""
    return tl.zeros([COLUMNS if FAST else LANES], tl.int32)


@triton.jit
def count_numbers(bits, FAST: tl.constexpr):
    """Counts of a tile [rows, COLUMNS] of words with numbers in bits 20 to 24.

    The rows of a column have to be in one thread: then nothing leaves its lane.
    """
    if FAST:
        counts = tl.sum(
            tl.inline_asm_elementwise(_VOTE, "=r,r", [bits], dtype=tl.int32, is_pure=False, pack=1),
            axis=0,
        )
    else:
        counts = tl.histogram(tl.ravel((bits >> 20) & (LANES - 1)), LANES)
    return counts


@triton.jit
def add_counts(counts_ptr, counts, FAST: tl.constexpr):
    """Add them to the counts [32] there, by numbers."""
    if FAST:
        # in one instruction, so that counts and lanes stay together
        counts, number = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.u32 $1, %laneid;",
            "=r,=r,r",
            [counts],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        number = tl.arange(0, LANES)
    tl.atomic_add(counts_ptr + number, counts, sem="relaxed")


_STORE = tl.constexpr("""
{
.reg .pred p;
setp.ne.s32 p, $3, 0;
@p st.global.b32 [$1], $2;
mov.b32 $0, 0;
}
""")


@triton.jit
def scatter(pointers, words, mask, FAST: tl.constexpr):
    """Store words of 32 bits to places that are not in a row."""
    if FAST:
        addresses = pointers.to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            _STORE, "=r,l,r,r", [addresses, words, mask.to(tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointers, words, mask=mask)
