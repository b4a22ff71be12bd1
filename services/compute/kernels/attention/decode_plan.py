"""How a step's decode attention is divided: a list of items, made on the device once a step.

A row's context is cut into chunks; an item is one chunk of one row, and a program of
decode_attention takes one item for one kv head. Rows of one slot that follow one another, as those
of its drafts do, are one item where they fit in its tile: they see the same context, which is read
once for all of them.

Shape legend: I items, R rows, C size classes, K kv heads, G query heads of a kv head, M queries of
an item by its rows and their heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.step.first_seen import step_begin, window_and_step
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, StepInputs

ITEM_WORDS = tl.constexpr(8)
ROW, SLOT, CHUNK, SIZE, LENGTH, FIRST, NUM_ROWS = map(tl.constexpr, range(7))
"""Words of an item: its first row, the row's slot, the chunk's number in the row, the positions of
a chunk, the context length of its last row, the place of its chunk 0 among the partial results
(which has none, and its place may be below 0, where a window hides it), and how many rows it is of,
each a position longer than the one before."""

TILE_QUERIES = 16
"""Of an item at most: two tiles of a product's columns, which read keys and values once."""

MIN_CHUNK = 64
"""A chunk's positions at least: a tile or two of the kernel, below which merging costs more than it
hides."""

FINENESS = tl.constexpr(16)
"""Chunks are a multiple of so much of the next power of two. Powers of two alone cut 16 rows of a
few more than 32,768 tokens into chunks of 32,768, and half of the programs had all the work: a step
of 8B took 31 ms with them."""

EXTRA_PROGRAMS = 132
"""Programs that a step may have beyond one for each row and kv head: one for each of the H200's 132
multiprocessors. Twice as many took 16.7 µs instead of 12.0 for one row of 4096 tokens, 132.8
instead of 126.8 for 256 rows (8B's shape)."""

LONG_CHUNK = tl.constexpr(1024)
LONG_SHARE = tl.constexpr(3)
"""Where chunks would be longer than this, there may be so many times the extra programs: they hide
one another's waits, and merging is little beside them. 16 rows of 33,000 tokens took 560 µs in
bfloat16 and 380 in FP8, and take 499 and 291; one such row 58, and 43 with twice as many. Four
times as many do not run at once: 613 and 333."""

TILE_TOKENS = 64
TILE_BYTES = 8 << 10
"""Keys of a tile at most: with as many of values and three stages, six programs fit a
multiprocessor. 8B's 256 rows took 128.0 µs with them, 134.4 with four warps, 132.8 with tiles of
twice the size, 146 with four times."""


TILE_SUMS = 2048
"""Of a warp at most: heads of a group times their width."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How a program walks through its chunk."""

    block_tokens: int
    num_warps: int = 2
    num_stages: int = 3
    merge_registers: int = 128  # of a thread, for partial results that a merge has in flight

    @staticmethod
    def of(head_dim: int, element_bytes: int, group: int) -> DecodeTiling:
        token_bytes = padded(head_dim) * element_bytes
        block_tokens = max(16, min(TILE_TOKENS, TILE_BYTES // token_bytes))
        warps = 4 if element_bytes == 4 else 2  # float32 would spill
        # and so would sums of more than 64 registers a thread
        many = padded(group) * padded(head_dim) // (TILE_SUMS * warps)
        return DecodeTiling(block_tokens, num_warps=warps * max(1, many))


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Static buffers of a step's decode attention; every layer of the step uses them in turn.

    Layers of another span have their own items and share the rest (`for_span`).
    """

    items: Tensor  # int32 [I, ITEM_WORDS], the long ones first
    num_items: Tensor  # int32 [1]
    scratch: Tensor  # int32 [3, R padded to a power of two], the plan's own
    partial_IKMD: Tensor  # float32, weighted values of a chunk, not divided by its sum
    partial_stats: Tensor  # float32 [2, I, K, M], a chunk's greatest score (base 2) and its sum
    arrivals_RK: Tensor  # int32, chunks of a row and head that are done; zero between launches
    max_rows: int
    extra_items: int  # that a step may have beyond one for each row, if its chunks are short
    one_wave: bool  # chunks are no shorter than these items' equal shares of all positions
    min_chunk: int
    tiling: DecodeTiling | None
    rows_together: int  # of a slot, at most, that are one item
    span: AttentionSpan = FULL  # of the layers that this is planned for

    @staticmethod
    def make(
        max_rows: int,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        *,
        device: torch.device,
        extra_programs: int = EXTRA_PROGRAMS,
        one_wave: bool = False,
        min_chunk: int = MIN_CHUNK,
        tiling: DecodeTiling | None = None,
        rows_together: int = 1,
    ) -> DecodeWork:
        """Buffers for up to max_rows rows of any length, whose chunks share the items.

        `one_wave`: extra_programs are all that run at once. As many equal parts of all positions
        are the finest chunks that there may be: with finer ones the last would begin late.
        """
        extra_items = -(-extra_programs // num_kv_heads)
        items = max_rows + (1 if one_wave else int(LONG_SHARE.value)) * extra_items
        queries = rows_together * group

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeWork(
            items=zeros(items, ITEM_WORDS.value),
            num_items=zeros(1),
            scratch=zeros(3, padded(max_rows)),
            partial_IKMD=zeros(items, num_kv_heads, queries, head_dim, dtype=torch.float32),
            partial_stats=zeros(2, items, num_kv_heads, queries, dtype=torch.float32),
            arrivals_RK=zeros(max_rows, num_kv_heads),
            max_rows=max_rows,
            extra_items=extra_items,
            one_wave=one_wave,
            min_chunk=min_chunk,
            tiling=tiling,
            rows_together=rows_together,
        )

    def for_span(self, span: AttentionSpan) -> DecodeWork:
        """With a plan of its own for layers that see these positions."""
        if span == self.span:
            return self
        items, num_items, scratch = map(
            torch.zeros_like, (self.items, self.num_items, self.scratch)
        )
        return replace(self, items=items, num_items=num_items, scratch=scratch, span=span)

    def item_limit(self, num_rows: int) -> int:
        """Items at most of a step with this many rows: the grid of its launches."""
        return num_rows + len(self.items) - self.max_rows


def rows_together(group: int, max_drafts: int) -> int:
    """Of a slot with so many drafts at most, that are one item where heads share keys so."""
    return max(1, min(TILE_QUERIES // group, 1 + max_drafts))


def padded(size: int, least: int = 16) -> int:
    """The next power of two from this on: what a tile of the kernel is made of."""
    return max(least, 1 << (size - 1).bit_length())


PLAN_ITEMS = 256  # items written at once
PLAN_WARPS = 8

_NUM_DECODE_ROWS = tl.constexpr(NUM_DECODE_ROWS)
_SIZE_CLASSES = tl.constexpr(8)


@triton.jit
def load_item(items, item):
    """Its words in their order. They lie in one sector and are asked for together, with what is
    loaded before them: were these loads not volatile, the compiler would put them off until that
    had come, or beyond."""
    at = items + item * ITEM_WORDS
    row = tl.load(at + ROW, volatile=True)
    slot = tl.load(at + SLOT, volatile=True)
    chunk = tl.load(at + CHUNK, volatile=True)
    size = tl.load(at + SIZE, volatile=True)
    length = tl.load(at + LENGTH, volatile=True)
    first = tl.load(at + FIRST, volatile=True)
    return row, slot, chunk, size, length, first


@triton.jit
def _store_items(items, place, row, slot, chunk, size, length, first, num_rows, mask):
    item = items + place * ITEM_WORDS
    tl.store(item + ROW, row, mask=mask)
    tl.store(item + SLOT, slot, mask=mask)
    tl.store(item + CHUNK, chunk, mask=mask)
    tl.store(item + SIZE, size, mask=mask)
    tl.store(item + LENGTH, length, mask=mask)
    tl.store(item + FIRST, first, mask=mask)
    tl.store(item + NUM_ROWS, num_rows, mask=mask)


@triton.jit
def _first_seen(length, window, STEP: tl.constexpr):
    """Where a query at the end of so many positions begins to see."""
    first = length * 0
    if window is not None:
        first = tl.maximum(step_begin(length - 1, STEP) + 1 - window, 0)
    return first


@triton.jit
def _rows_of_items(slot_R, number_R, row_R, num_decode_rows, inputs, TOGETHER: tl.constexpr):
    """Of how many rows an item is that begins with this one; 0 if another one's has it."""
    inside_R = row_R < num_decode_rows
    behind_R = inside_R & (row_R > 0) & (number_R % TOGETHER != 0)
    slot_before_R = tl.load(inputs.row_slot_R + row_R - 1, mask=behind_R, other=-1)
    number_before_R = tl.load(inputs.row_number_R + row_R - 1, mask=behind_R, other=-1)
    follows_R = behind_R & (slot_before_R == slot_R) & (number_before_R + 1 == number_R)
    num_rows_R = (inside_R & ~follows_R).to(tl.int32)
    goes_on_R = num_rows_R > 0
    for ahead in tl.static_range(1, TOGETHER):
        goes_on_R = goes_on_R & (row_R + ahead < num_decode_rows)
        goes_on_R = goes_on_R & ((number_R + ahead) % TOGETHER != 0)
        slot_ahead_R = tl.load(inputs.row_slot_R + row_R + ahead, mask=goes_on_R, other=-1)
        number_ahead_R = tl.load(inputs.row_number_R + row_R + ahead, mask=goes_on_R, other=-1)
        goes_on_R = goes_on_R & (slot_ahead_R == slot_R) & (number_ahead_R == number_R + ahead)
        num_rows_R += goes_on_R.to(tl.int32)
    return num_rows_R


@triton.jit
def _num_chunks(last_R, from_R, size):
    """Of all rows; a row without positions ends at -1."""
    return tl.sum((last_R + size) // size - from_R // size)


@triton.jit(do_not_specialize=["num_rows", "extra_items", "window"])
def _plan_kernel(
    inputs,
    items,
    num_items,
    scratch,  # [3, BLOCK_R]
    num_rows,
    extra_items,
    window,  # or None
    STEP: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    TOGETHER: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LOG2_BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.arange(0, BLOCK_R)
    # Rows of the bucket are asked for together with the number of those that are real.
    inside_R = row_R < num_rows
    last_R = tl.load(inputs.q_start_R + row_R, mask=inside_R, other=-1)
    slot_R = tl.load(inputs.row_slot_R + row_R, mask=inside_R, other=0)
    number_R = row_R * 0
    if TOGETHER > 1:
        number_R = tl.load(inputs.row_number_R + row_R, mask=inside_R, other=0)
    num_decode_rows = tl.minimum(tl.load(inputs.counts + _NUM_DECODE_ROWS), num_rows)
    num_rows_R = _rows_of_items(slot_R, number_R, row_R, num_decode_rows, inputs, TOGETHER)
    begins_R = num_rows_R > 0
    more_R = tl.where(begins_R, num_rows_R - 1, 0)
    num_decode_rows = tl.sum(begins_R.to(tl.int32))
    last_R = tl.where(begins_R, last_R + more_R, -1)  # a row that is none has no chunk
    if PDL:
        tl.extra.cuda.gdc_wait()

    # The step's own rows count, not the bucket's: one for many rows would be cut too finely.
    item_limit = num_decode_rows + extra_items
    from_R = _first_seen(last_R + 1 - more_R, window, STEP)
    num_positions = tl.sum(last_R + 1 - from_R)
    num_shares = item_limit
    if ONE_WAVE:
        num_shares = extra_items
    elif num_positions > item_limit * LONG_CHUNK:
        item_limit = num_decode_rows + LONG_SHARE * extra_items
        num_shares = item_limit
    size = num_rows * 0 + MIN_SIZE
    while num_positions > size * num_shares:  # no use in counting these
        size *= 2
    while _num_chunks(last_R, from_R, size) > item_limit:
        size *= 2
    # The smallest of these that is enough, then what lies between it and its half, which is not.
    cut = size // 2
    finest = tl.maximum(size // FINENESS, MIN_SIZE)
    while cut > finest:
        cut = cut // 2
        finer = size - cut
        is_share = num_positions <= finer * num_shares
        if is_share & (_num_chunks(last_R, from_R, finer) <= item_limit):
            size = finer

    # All chunks of a row but its last are full (and its first, of a window). They come first in the
    # list and the last chunks follow by size: what starts late is short.
    last_chunk_R = (last_R + size) // size - 1  # -1: no chunk
    skipped_R = from_R // size  # chunks before the window
    full_R = tl.maximum(last_chunk_R - skipped_R, 0)
    first_full_R = tl.cumsum(full_R, 0) - full_R
    count_R = last_chunk_R - skipped_R + 1
    first_R = tl.cumsum(count_R, 0) - count_R - skipped_R
    num_full = tl.sum(full_R)
    tl.store(num_items, num_full + num_decode_rows)

    rest_R = last_R - last_chunk_R * size  # positions of the last chunk, less one
    if window is not None:
        rest_R = tl.minimum(rest_R, last_R - step_begin(last_R, STEP) + window - 1)
    class_R = _SIZE_CLASSES - 1 - (rest_R * _SIZE_CLASSES) // size
    class_C = tl.arange(0, _SIZE_CLASSES)
    is_RC = ((class_R[:, None] == class_C[None, :]) & begins_R[:, None]).to(tl.int32)
    of_class_C = tl.sum(is_RC, axis=0)
    before_C = tl.cumsum(of_class_C, 0) - of_class_C
    place_RC = tl.cumsum(is_RC, 0) - is_RC + before_C[None, :]
    place_R = num_full + tl.sum(is_RC * place_RC, axis=1)
    _store_items(
        items, place_R, row_R, slot_R, last_chunk_R, size, last_R + 1, first_R, num_rows_R, begins_R
    )

    tl.store(scratch + row_R, first_full_R)
    tl.store(scratch + BLOCK_R + row_R, first_R)
    tl.store(scratch + 2 * BLOCK_R + row_R, more_R)
    tl.debug_barrier()
    for begin in range(0, num_full, BLOCK_I):
        place_I = begin + tl.arange(0, BLOCK_I)
        mask_I = place_I < num_full
        row_I = tl.zeros([BLOCK_I], tl.int32)  # the last row whose first full chunk is not beyond
        for step in tl.static_range(LOG2_BLOCK_R):
            probe_I = row_I + (BLOCK_R >> (step + 1))
            row_I = tl.where(tl.load(scratch + probe_I) <= place_I, probe_I, row_I)
        chunk_I = place_I - tl.load(scratch + row_I)
        first_I = tl.load(scratch + BLOCK_R + row_I)
        more_I = tl.load(scratch + 2 * BLOCK_R + row_I)
        slot_I = tl.load(inputs.row_slot_R + row_I, mask=mask_I, other=0)
        length_I = tl.load(inputs.q_start_R + row_I, mask=mask_I, other=0) + 1
        chunk_I += _first_seen(length_I, window, STEP) // size
        length_I += more_I
        _store_items(
            items, place_I, row_I, slot_I, chunk_I, size, length_I, first_I, more_I + 1, mask_I
        )


def plan_decode(
    inputs: StepInputs, work: DecodeWork, page_tokens: int, num_rows: int, *, pdl: bool = False
) -> None:
    """Write the list of items for the step's decode rows, for launches of the same num_rows.

    Of a span (`work.span`) there are the chunks that it reaches. Chunks are as short as the
    decode rows' share of items allows, so that a long row among short ones is cut finely. With pdl
    the step's inputs are read above the wait (see dependent_launch).
    """
    chunk = triton.next_power_of_2(max(work.min_chunk, page_tokens))
    block_rows = work.scratch.shape[1]
    window, step = window_and_step(work.span)
    _plan_kernel[(1,)](
        inputs,
        work.items,
        work.num_items,
        work.scratch,
        num_rows,
        work.extra_items,
        window or None,
        STEP=step,
        ONE_WAVE=work.one_wave,
        TOGETHER=work.rows_together,
        MIN_SIZE=chunk,
        BLOCK_R=block_rows,
        LOG2_BLOCK_R=block_rows.bit_length() - 1,
        BLOCK_I=PLAN_ITEMS,
        num_warps=PLAN_WARPS,
        **dependent_launch(pdl, work.items),
    )
