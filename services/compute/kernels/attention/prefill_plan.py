"""How a step's prefill attention is divided: a list of blocks of queries, made on the device.

Shape legend: I items, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, NUM_ROWS, StepInputs

PROGRAMS_PER_SM = 8
"""Launched at most. A program takes several tiles when there are more, so that a bucket's surplus
programs stay few (each holds a place on its SM for about 1 µs) and the hardware still balances."""


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """A program's tile: `block_m` rows (queries times heads of a group) by `block_n` keys.

    `block_n` decides the order of the sums, so results are bitwise comparable only where it is
    the same. It must not depend on anything that changes between steps.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = PROGRAMS_PER_SM


NARROW = PrefillTiling(block_m=128, block_n=64, num_warps=8, num_stages=3)
"""Half precision, heads up to 64. On an H200 37 prompts of 220 tokens take 61 us in these tiles and
107 in 128 x 128; only a chunk after a long prefix is slower in them (98 us against 80)."""
MIDDLE = PrefillTiling(block_m=64, block_n=64, num_warps=4, num_stages=2)
"""Half precision, heads up to 128. 4096 tokens take 360 us (382 TFLOP/s) and 381 in 128 x 64, 37
prompts of 220 tokens 121 and 138: two programs fit a multiprocessor."""
WIDE = PrefillTiling(block_m=128, block_n=64, num_warps=8, num_stages=2)
"""Half precision, heads up to 256: 192 KiB of the 227 KiB of shared memory. What spills does so
once a tile, not in the loops over keys (76 bytes a thread); 128 x 32 takes twice the turns."""
FLOAT32 = PrefillTiling(block_m=64, block_n=32, num_warps=8, num_stages=2)
"""IEEE products, which tensor cores do not have: for checking, not for speed."""
FLOAT32_WIDE = PrefillTiling(block_m=32, block_n=32, num_warps=8, num_stages=2)


def tiling_of(dtype: torch.dtype, head_width: int) -> PrefillTiling:
    if dtype == torch.float32:
        return FLOAT32 if head_width <= 128 else FLOAT32_WIDE
    if head_width <= 64:
        return NARROW
    return MIDDLE if head_width <= 128 else WIDE


ITEM_ROWS = 128
"""Rows of an item, queries times heads of a group: the largest `block_m`."""
HOST_SMS = 2
"""What the interpreter is told of its processors; few, so that programs take several tiles."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Items in order of falling context. Filled by `plan_prefill`, read by `prefill_attention`."""

    items_I2: Tensor  # int32 (row, first query of the block within the row)
    num_items: Tensor  # int32 [1]
    block_q: int  # queries of an item
    group: int  # query heads per head of keys
    max_rows: int
    num_sms: int

    @staticmethod
    def make(max_tokens: int, max_rows: int, group: int, device: torch.device) -> PrefillWork:
        """Room for the largest step; `group` is the number of query heads per head of keys.

        Raises ValueError for groups of more than 64, of which a tile would not hold one query.
        """
        if not 1 <= group <= ITEM_ROWS // 2:
            raise ValueError(f"query heads per head of keys must be 1 to 64, not {group}")
        block_q = 2 * (ITEM_ROWS // 2 // group)  # even, so that tiles of half the rows fill up too
        max_items = num_items_bound(max_tokens, max_rows, block_q)
        num_sms = HOST_SMS
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return PrefillWork(
            items_I2=torch.zeros(max_items, 2, dtype=torch.int32, device=device),
            num_items=torch.zeros(1, dtype=torch.int32, device=device),
            block_q=block_q,
            group=group,
            max_rows=max_rows,
            num_sms=num_sms,
        )


def num_items_bound(num_tokens: int, max_rows: int, block_q: int) -> int:
    """The most items that rows of this many tokens together can have."""
    return num_tokens // block_q + min(max_rows, num_tokens)


@triton.jit
def load_tile(items_I2, q_len_R, item, split, ITEM_Q: tl.constexpr, TILE_Q: tl.constexpr):
    """The row of an item's tile, its first query in the row, and how many it has: maybe none."""
    row = tl.load(items_I2 + item * 2)
    item_first = tl.load(items_I2 + item * 2 + 1)
    first = item_first + split * TILE_Q
    num_q = tl.minimum(tl.load(q_len_R + row), item_first + ITEM_Q) - first
    return row, first, tl.maximum(tl.minimum(num_q, TILE_Q), 0)


PLAN_ITEMS = 32
PLAN_ROWS = 128


@triton.jit
def _queries(q_len_R, begin_R, row, mask, HAVE_KEYS: tl.constexpr):
    """How many of a row are planned."""
    q_len = tl.load(q_len_R + row, mask=mask, other=0)
    if begin_R is not None:
        has_keys = tl.load(begin_R + row, mask=mask, other=0) >= 0
        q_len = tl.where(has_keys == HAVE_KEYS, q_len, 0)
    return q_len


@triton.jit
def _plan_kernel(
    counts,
    q_start_R,
    q_len_R,
    begin_R,  # or None
    items_I2,
    num_items_ptr,
    ROWS_AT: tl.constexpr,
    DECODE_ROWS_AT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    HAVE_KEYS: tl.constexpr,
    ITEMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program for each row: an item's place is the number of items that come before it."""
    num_rows = tl.load(counts + ROWS_AT)
    first_row = tl.load(counts + DECODE_ROWS_AT)
    if ALL_ROWS:
        first_row = num_rows * 0
    row = first_row + tl.program_id(0)
    q_start = tl.load(q_start_R + row, mask=row < num_rows, other=0)
    q_len = _queries(q_len_R, begin_R, row, row < num_rows, HAVE_KEYS)
    num_blocks = (q_len + BLOCK_Q - 1) // BLOCK_Q
    for first_block in range(0, num_blocks, ITEMS):
        block_I = first_block + tl.arange(0, ITEMS)
        position_I = q_start + block_I * BLOCK_Q
        place_I = tl.zeros([ITEMS], tl.int32)
        for first_other in range(first_row, num_rows, ROWS):
            other_R = first_other + tl.arange(0, ROWS)
            start_R = tl.load(q_start_R + other_R, mask=other_R < num_rows, other=0)
            len_R = _queries(q_len_R, begin_R, other_R, other_R < num_rows, HAVE_KEYS)
            blocks_R = (len_R + BLOCK_Q - 1) // BLOCK_Q
            # Of equal positions the earlier row's comes first.
            reach_IR = (
                position_I[:, None] - start_R[None, :] - (other_R < row).to(tl.int32)[None, :]
            )
            after_IR = tl.where(reach_IR < 0, 0, reach_IR // BLOCK_Q + 1)
            place_I += tl.sum(tl.maximum(blocks_R[None, :] - after_IR, 0), axis=1)
        present_I = block_I < num_blocks
        tl.store(items_I2 + place_I * 2, row + block_I * 0, mask=present_I)
        tl.store(items_I2 + place_I * 2 + 1, block_I * BLOCK_Q, mask=present_I)
    if tl.program_id(0) == 0:
        blocks_R = tl.zeros([ROWS], tl.int32)
        for first_other in range(first_row, num_rows, ROWS):
            other_R = first_other + tl.arange(0, ROWS)
            len_R = _queries(q_len_R, begin_R, other_R, other_R < num_rows, HAVE_KEYS)
            blocks_R += (len_R + BLOCK_Q - 1) // BLOCK_Q
        tl.store(num_items_ptr, tl.sum(blocks_R, axis=0))


def plan_prefill(
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    all_rows: bool = False,
    *,
    begin_R: Tensor | None = None,
    have_keys: bool = True,
) -> None:
    """Write the blocks of queries of all chunk rows, those of the longest context first.

    `num_tokens` is the bucket. With `all_rows`, decode rows are taken for chunks of one token; with
    `begin_R` (latent_expansion.py), only rows that have keys there are planned, or only the others.
    """
    _plan_kernel[(min(work.max_rows, num_tokens),)](
        inputs.counts,
        inputs.q_start_R,
        inputs.q_len_R,
        begin_R,
        work.items_I2,
        work.num_items,
        ROWS_AT=NUM_ROWS,
        DECODE_ROWS_AT=NUM_DECODE_ROWS,
        BLOCK_Q=work.block_q,
        ALL_ROWS=all_rows,
        HAVE_KEYS=have_keys,
        ITEMS=PLAN_ITEMS,
        ROWS=PLAN_ROWS,
        num_warps=4,
    )


def plan_prefill_reference(
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    all_rows: bool = False,
    *,
    begin_R: Tensor | None = None,
    have_keys: bool = True,
) -> None:
    first_row = 0 if all_rows else int(inputs.counts[NUM_DECODE_ROWS])
    starts = inputs.q_start_R.tolist()
    lengths = inputs.q_len_R.tolist()
    items = [
        (row, first)
        for row in range(first_row, int(inputs.counts[NUM_ROWS]))
        if begin_R is None or (int(begin_R[row]) >= 0) == have_keys
        for first in range(0, lengths[row], work.block_q)
    ]
    items.sort(key=lambda item: -(starts[item[0]] + item[1]))
    if items:
        work.items_I2[: len(items)] = torch.tensor(items, dtype=torch.int32)
    work.num_items.fill_(len(items))
