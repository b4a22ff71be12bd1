"""Sums of hidden states by slot, for embeddings of prompts that come in chunks.

Shape legend: R rows of the table, T rows of hidden states, N slots, E width, W words of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROW_WORDS = 5
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_SLOT, _FIRST, _NUM_TOKENS, _BEGINS, _OUT = map(tl.constexpr, range(ROW_WORDS))
"""Words of a row of the table: slot, first, num_tokens, begins, out. Hidden states first .. first +
num_tokens are added to the sum of the slot, which is 0 before where `begins` is not 0; the new sum
goes to row `out` of the output, too, but not if that is below 0."""

BLOCK_E = 128
BLOCK_T = 32


@triton.jit
def _pool_kernel(
    x_ptr,
    num_rows_ptr,
    table_ptr,
    sum_ptr,
    out_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    if row < tl.load(num_rows_ptr):
        word_ptr = table_ptr + row * _ROW_WORDS
        slot = tl.load(word_ptr + _SLOT).to(tl.int64)
        first = tl.load(word_ptr + _FIRST)
        num_tokens = tl.load(word_ptr + _NUM_TOKENS)
        kept = tl.load(word_ptr + _BEGINS) == 0
        out = tl.load(word_ptr + _OUT)
        e = part * BLOCK_E + tl.arange(0, BLOCK_E)
        inside = e < E
        total = tl.load(sum_ptr + slot * E + e, mask=inside & kept, other=0.0)
        for start in range(0, num_tokens, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            place = (first + t).to(tl.int64)[:, None] * E + e[None, :]
            mask = (t < num_tokens)[:, None] & inside[None, :]
            x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(x, axis=0)
        tl.store(sum_ptr + slot * E + e, total, mask=inside)
        tl.store(out_ptr + out.to(tl.int64) * E + e, total, mask=inside & (out >= 0))


def pool(x_TE: Tensor, num_rows: Tensor, table_RW: Tensor, sum_NE: Tensor, out_RE: Tensor) -> None:
    """Add rows of x to float32 sums, as the first `num_rows` (int32 [1]) rows of the table say.

    No slot has two of them. Sums are made in the order of the tokens, 32 at a time, whatever else
    is in the table.
    """
    width = x_TE.shape[1]
    _pool_kernel[(len(table_RW), triton.cdiv(width, BLOCK_E))](
        x_TE,
        num_rows,
        table_RW,
        sum_NE,
        out_RE,
        E=width,
        BLOCK_E=BLOCK_E,
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )


def pool_reference(
    x_TE: Tensor, num_rows: Tensor, table_RW: Tensor, sum_NE: Tensor, out_RE: Tensor
) -> None:
    """As the kernel's, in the precision of the sums."""
    for row in range(int(num_rows)):
        slot, first, num_tokens, begins, out = table_RW[row].tolist()
        if begins:
            sum_NE[slot] = 0.0
        sum_NE[slot] += x_TE[first : first + num_tokens].to(sum_NE.dtype).sum(dim=0)
        if out >= 0:
            out_RE[out] = sum_NE[slot]
