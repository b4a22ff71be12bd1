"""Which tiles a program of Hopper's prefill attention takes, and what brings in their operands.

Shape legend: M rows of a warpgroup (queries times heads of a group), D head width, P positions of a
page.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

HALF_ROWS = gl.constexpr(64)  # of an item, for a warpgroup: rows of a matrix instruction
PANEL = gl.constexpr(64)  # columns in 128 bytes, which is what a swizzled copy takes


@gluon.jit
def num_rounds(num_tiles):
    """How many tiles this program takes: forwards in even rounds and backwards in odd ones."""
    forwards = gl.program_id(0)
    num_programs = gl.num_programs(0)
    rounds = num_tiles // num_programs
    place = gl.where(rounds % 2 == 0, forwards, num_programs - 1 - forwards)
    return rounds + (place < num_tiles % num_programs).to(gl.int32)


@gluon.jit
def item_at(items_I2, step, num_tiles, K: gl.constexpr, HEADS: gl.constexpr):
    """The row, the first query and the head of keys of a round's tile; of some tile beyond them.

    All items of HEADS heads come before those of the next heads.
    """
    forwards = gl.program_id(0)
    num_programs = gl.num_programs(0)
    place = gl.where(step % 2 == 0, forwards, num_programs - 1 - forwards)
    tile = gl.maximum(gl.minimum(step * num_programs + place, num_tiles - 1), 0)
    first_head = 0
    if HEADS != K:
        of_heads = gl.maximum(num_tiles // (K // HEADS), 1)
        first_head = tile // of_heads * HEADS
        tile = tile % of_heads
    item = tile // HEADS
    row, first = gl.load(items_I2 + item * 2), gl.load(items_I2 + item * 2 + 1)
    return row, first, first_head + tile % HEADS


@gluon.jit
def first_seen(position, window, WINDOWED: gl.constexpr, STEP: gl.constexpr):
    first = position * 0
    if WINDOWED:
        if STEP == 0:  # see `first_seen.window_and_step`
            first = gl.minimum(position, 1)
        else:
            first = gl.maximum(position // STEP * STEP - window + 1, 0)
    return first


@gluon.jit
def _fetch_pages(
    pool,
    parts,
    stage,
    ready,
    pages,
    start,
    low,
    high,
    first_row,
    PAGE_ROWS: gl.constexpr,
    P: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PANELS: gl.constexpr,
):
    """Ask for a block's keys or values. Pages without any in [low, high) are read as zeros, since
    where they would be the table may say anything."""
    PAGES: gl.constexpr = BLOCK_N // P
    for number in gl.static_range(PAGES):
        position = start + number * P
        is_seen = (position < high) & (position + P > low)
        row = gl.where(is_seen, pages[number] * PAGE_ROWS + first_row, pool.shape[0])
        for panel in gl.static_range(PANELS):
            part = parts.index((stage * PANELS + panel) * PAGES + number)
            tma.async_copy_global_to_shared(pool, [row, panel * PANEL], ready, part)


@gluon.jit
def fetch_blocks(
    pool,
    key_parts,
    value_parts,
    barriers,
    page_table,
    row_slot_R,
    q_start_R,
    q_len_R,
    items_I2,
    num_tiles,
    window,
    TABLE_STRIDE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    K: gl.constexpr,
    PADDED_D: gl.constexpr,
    P: gl.constexpr,
    ITEM_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
    STEP: gl.constexpr,
):
    """The warp that fetches. What a tile is read from is asked for a tile ahead."""
    keys_ready, keys_free, values_ready, values_free = barriers
    PANELS: gl.constexpr = PADDED_D // PANEL
    BYTES: gl.constexpr = BLOCK_N * PADDED_D * 2  # columns beyond the heads' count, and are zeros
    row, first, head = item_at(items_I2, 0, num_tiles, K, K)
    next_row, next_first, next_head = item_at(items_I2, 1, num_tiles, K, K)
    q_start, q_len = gl.load(q_start_R + row), gl.load(q_len_R + row)
    slot = gl.load(row_slot_R + row)
    block = 0
    for step in range(num_rounds(num_tiles)):
        high = q_start + first + gl.minimum(q_len - first, ITEM_Q)
        low = first_seen(q_start + first, window, WINDOWED, STEP)
        table = page_table + slot.to(gl.int64) * TABLE_STRIDE
        key_row = head * P
        q_start, q_len = gl.load(q_start_R + next_row), gl.load(q_len_R + next_row)
        slot = gl.load(row_slot_R + next_row)
        first, head = next_first, next_head
        next_row, next_first, next_head = item_at(items_I2, step + 2, num_tiles, K, K)
        for start in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
            pages = ()
            for number in gl.static_range(BLOCK_N // P):
                position = start + number * P
                is_seen = (position < high) & (position + P > low)
                page = gl.load(table + position // P, mask=is_seen, other=0)
                pages = pages + (page,)  # type: ignore[assignment]
            stage = block % STAGES
            phase = block // STAGES & 1 ^ 1
            mbarrier.wait(keys_free.index(stage), phase)
            ready = keys_ready.index(stage)
            mbarrier.expect(ready, BYTES)
            _fetch_pages(
                pool, key_parts, stage, ready, pages, start, low, high, key_row,
                PAGE_ROWS, P, BLOCK_N, PANELS,
            )  # fmt: skip
            mbarrier.wait(values_free.index(stage), phase)
            ready = values_ready.index(stage)
            mbarrier.expect(ready, BYTES)
            _fetch_pages(
                pool, value_parts, stage, ready, pages, start, low, high, key_row + K * P,
                PAGE_ROWS, P, BLOCK_N, PANELS,
            )  # fmt: skip
            block += 1


@gluon.jit
def fetch_queries(
    buffer,
    q_THD,
    token,
    num_q,
    head,
    Q_STRIDE: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    PADDED_D: gl.constexpr,
):
    """Ask for the queries of a warpgroup; rows and columns beyond them are zeros."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // PADDED_D, PADDED_D // 8], [4, 1], [1, 0]
    )
    row_M = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    offset_D = gl.arange(0, PADDED_D, layout=gl.SliceLayout(0, layout))
    valid_M = row_M // G < gl.minimum(num_q, HALF_ROWS // G)
    at_M = (token + row_M // G).to(gl.int64) * Q_STRIDE + (head * (G * D) + row_M % G * D)
    async_copy.async_copy_global_to_shared(
        buffer,
        q_THD + at_M[:, None] + offset_D[None, :],
        mask=valid_M[:, None] & (offset_D < D)[None, :],
    )
    async_copy.commit_group()


@gluon.jit
def clear_values(
    parts,
    stage,
    position,
    low,
    high,
    P: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PANELS: gl.constexpr,
):
    """Zeros in a position's page for what is not in [low, high): 0 times anything shall be 0.

    Both warpgroups do so, and write the same.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PAGES: gl.constexpr = BLOCK_N // P
    number = position % BLOCK_N // P
    position_P = position // P * P + gl.arange(0, P, layout=gl.SliceLayout(1, layout))
    kept_P1 = ((position_P >= low) & (position_P < high))[:, None]
    for panel in gl.static_range(PANELS):
        part = parts.index((stage * PANELS + panel) * PAGES + number)
        part.store(gl.where(kept_P1, part.load(layout), 0.0))
