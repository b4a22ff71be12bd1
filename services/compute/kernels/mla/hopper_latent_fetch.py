"""What brings in the operands of Hopper's decode attention over latents.

Shape legend: M heads of a tile, N latents of a block, C columns of half a latent, R width of a
latent, P of the rotated part.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from services.compute.kernels.attention.decode_plan import (
    CHUNK,
    FIRST,
    ITEM_WORDS,
    LENGTH,
    ROW,
    SIZE,
    SLOT,
)

BLOCK_N = gl.constexpr(64)
PANEL = gl.constexpr(64)  # columns in 128 bytes, which is what a swizzled copy takes


@gluon.jit
def load_place(items, item):
    """Of an item: row, slot, where its positions begin and end, the context's length, and the place
    among partial results."""
    at = items + item * ITEM_WORDS
    row, slot = gl.load(at + ROW), gl.load(at + SLOT)
    chunk, size = gl.load(at + CHUNK), gl.load(at + SIZE)
    length, first = gl.load(at + LENGTH), gl.load(at + FIRST)
    start = chunk * size
    return row, slot, start, gl.minimum(start + size, length), length, first + chunk


@gluon.jit
def num_blocks_of(start, end):
    return (end - start + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _load_rows(
    table, position, end, PAGE_ROWS: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr
):
    """Where a block's boxes begin in the pool; below 0 where they are beyond the context, since the
    table may say anything there."""
    rows = ()
    for number in gl.static_range(BLOCK_N // BOX):
        at = position + number * BOX
        page = gl.load(table + at // PAGE, mask=at < end, other=0)
        row = gl.where(at < end, page * PAGE_ROWS + at % PAGE, -1)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _copy(pool, parts, first_part, ready, rows, column, WIDTH: gl.constexpr, BOX: gl.constexpr):
    """Ask for columns of a block. What is beyond the context is read as zeros."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    for number in gl.static_range(BOXES):
        row = gl.where(rows[number] < 0, pool.shape[0], rows[number])
        for panel in gl.static_range(WIDTH // PANEL):
            part = parts.index((first_part * (WIDTH // PANEL) + panel) * BOXES + number)
            tma.async_copy_global_to_shared(pool, [row, column + panel * PANEL], ready, part)


@gluon.jit
def fetch_latents(
    pool,
    latent_parts,
    turned_parts,
    barriers,
    page_table,
    items,
    num_items,
    TABLE_ROW: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    TILES: gl.constexpr,
    PAGE: gl.constexpr,
    BOX: gl.constexpr,
    C: gl.constexpr,
    P: gl.constexpr,
):
    """The warp that fetches. A block comes in two parts, as its room becomes free: the columns that
    its owner multiplies, and the rest. Page ids are loaded a block ahead."""
    own_ready, rest_ready, own_free, rest_free = barriers
    even = 0  # blocks so far of each warpgroup
    odd = 0
    num_units = gl.load(num_items) * TILES
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        slot, start, end = load_place(items, unit // TILES)[1:4]
        table = page_table + slot.to(gl.int64) * TABLE_ROW
        num_blocks = num_blocks_of(start, end)
        rows = _load_rows(table, start, end, PAGE_ROWS, PAGE, BOX)
        for block in range(num_blocks):
            stage = block % 2
            phase = (gl.where(stage == 0, even, odd) + block // 2) & 1 ^ 1
            ready = own_ready.index(stage)
            mbarrier.wait(own_free.index(stage), phase)
            mbarrier.expect(ready, BLOCK_N * C * 2)
            _copy(pool, latent_parts, 3 * stage, ready, rows, stage * C, C, BOX)
            ready = rest_ready.index(stage)
            mbarrier.wait(rest_free.index(stage), phase)
            mbarrier.expect(ready, BLOCK_N * (C + P) * 2)
            _copy(pool, latent_parts, 1 + stage, ready, rows, (1 - stage) * C, C, BOX)
            _copy(pool, turned_parts, stage, ready, rows, 2 * C, P, BOX)
            next_start = start + (block + 1) * BLOCK_N
            rows = _load_rows(table, next_start, end, PAGE_ROWS, PAGE, BOX)
        even += (num_blocks + 1) // 2
        odd += num_blocks // 2


@gluon.jit
def fetch_queries(
    HALF: gl.constexpr, q_halves, q_turned, q_ptr, G: gl.constexpr, R: gl.constexpr, P: gl.constexpr
):
    """A warpgroup asks for half of the columns, the first one for the rotated part, too; heads
    beyond those of the tile are zeros."""
    C: gl.constexpr = R // 2
    _copy_queries(q_halves.index(HALF), q_ptr + HALF * C, G, R + P, C)
    if HALF == 0:
        _copy_queries(q_turned, q_ptr + R, G, R + P, P)
    async_copy.commit_group()


@gluon.jit
def _copy_queries(buffer, q_ptr, G: gl.constexpr, STRIDE: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    M: gl.constexpr = buffer.shape[0]
    g_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(
        buffer,
        q_ptr + g_M[:, None] * STRIDE + column[None, :],
        mask=(g_M < G)[:, None] & (column < WIDTH)[None, :],
    )


@gluon.jit
def clear_latents(parts, first_part, start, end, BOX: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros behind the end in the box where it lies: 0 times anything shall be 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BOXES: gl.constexpr = BLOCK_N // BOX
    number = (end - start) // BOX
    position_B = start + number * BOX + gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    for panel in gl.static_range(WIDTH // PANEL):
        part = parts.index((first_part * (WIDTH // PANEL) + panel) * BOXES + number)
        part.store(gl.where((position_B < end)[:, None], part.load(layout), 0.0))
