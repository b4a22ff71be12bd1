"""Blocks of a cache with 8 bits, for Hopper's prefill attention: two warpgroups make of entries and
scales the numbers that the copy engine would bring of a cache in 16 bits.

What is not seen becomes zero, whatever lies there.

Shape legend: N keys of a block, W words of a head's entries, P positions of a page.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from services.compute.kernels.attention.hopper_fetch import first_seen, item_at, num_rounds


@gluon.constexpr_function
def _lines(rows: int, words: int, warps: int) -> gl.DistributedLinearLayout:
    """Return which thread has which words: four in a row each, eight threads those of half a panel
    in two rows, whose numbers lie in all banks of shared memory."""
    columns = [[0, word] for word in (4, 8, 16, 32) if word < words]
    heights = [[1 << bit, 0] for bit in range(rows.bit_length() - 1)]
    places = columns[:2] + heights[:1] + columns[2:] + heights[1:]
    last = 5 + warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *places[last:]], places[:5], places[5:last], [], [rows, words]
    )


def numbers_of(entry: str, dtype: str) -> str:
    """Return instructions that make two words of two numbers of a word of four entries and a scale;
    exact but for the last rounding, to "bf16" or "f16"."""
    if entry == "fp8":
        lines = [
            "mov.b32 {a0, a1}, $2;",
            "cvt.rn.f16x2.e4m3x2 x, a0; cvt.rn.f16x2.e4m3x2 y, a1;",
            "mov.b32 {a0, a1}, x; mov.b32 {a2, a3}, y;",
            *(f"cvt.f32.f16 f{i}, a{i}; mul.f32 f{i}, f{i}, $3;" for i in range(4)),
        ]
    else:
        # With its sign bit turned a byte is n + 128; as the third byte of a float32 from 32,768 on
        # it is n + 32,896. That has 9 bits and a scale 8, so that their product is exact.
        lines = [
            "xor.b32 x, $2, 0x80808080; mov.b32 y, 0x47; mul.f32 g, $3, 0fC7008000;",
            *(f"prmt.b32 z, x, y, {0x4505 + 16 * i:#x}; mov.b32 f{i}, z;" for i in range(4)),
            *(f"fma.rn.f32 f{i}, f{i}, $3, g;" for i in range(4)),
        ]
    lines += [f"cvt.rn.{dtype}x2.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
    return "{ .reg .b16 a<4>; .reg .b32 x, y, z; .reg .f32 f<4>, g; " + " ".join(lines) + " }"


@gluon.jit
def _store_numbers(block, words_NW, scale_bits_N, NUMBERS: gl.constexpr):
    scale_N = scale_bits_N.to(gl.float32, bitcast=True)
    first_NW, second_NW = gl.inline_asm_elementwise(
        NUMBERS, "=r,=r,r,r", [words_NW, scale_N[:, None]], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    block.store(gl.join(first_NW, second_NW).reshape(block.shape))


@gluon.jit
def widen_blocks(
    pool,
    scales,
    key_words,
    value_words,
    barriers,
    page_table,
    row_slot_R,
    q_start_R,
    q_len_R,
    items_I2,
    num_tiles,
    window,
    TABLE_STRIDE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr,
    NUMBERS: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ITEM_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
    STEP: gl.constexpr,
):
    """What `fetch_blocks` does, by words of four entries. A block's words are on their way while
    there is no room for it."""
    keys_ready, keys_free, values_ready, values_free = barriers
    W: gl.constexpr = D // 4
    PADDED_W: gl.constexpr = key_words.shape[2] // 2
    layout: gl.constexpr = _lines(BLOCK_N, PADDED_W, gl.num_warps())
    offset_W = gl.arange(0, PADDED_W, layout=gl.SliceLayout(0, layout))
    offset_N = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    row, first, head = item_at(items_I2, 0, num_tiles, K, K)
    next_row, next_first, next_head = item_at(items_I2, 1, num_tiles, K, K)
    q_start, q_len = gl.load(q_start_R + row), gl.load(q_len_R + row)
    slot = gl.load(row_slot_R + row)
    block = 0
    for step in range(num_rounds(num_tiles)):
        high = q_start + first + gl.minimum(q_len - first, ITEM_Q)
        low = first_seen(q_start + first, window, WINDOWED, STEP)
        table = page_table + slot.to(gl.int64) * TABLE_STRIDE
        keys = pool + head * (P * W)
        head_scales = scales + head * P
        q_start, q_len = gl.load(q_start_R + next_row), gl.load(q_len_R + next_row)
        slot = gl.load(row_slot_R + next_row)
        first, head = next_first, next_head
        next_row, next_first, next_head = item_at(items_I2, step + 2, num_tiles, K, K)
        for start in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
            position_N = start + offset_N
            seen_N = (position_N >= low) & (position_N < high)
            seen_NW = seen_N[:, None] & (offset_W < W)[None, :]
            page_N = gl.load(table + position_N // P, mask=seen_N, other=0).to(gl.int64)
            at_N = page_N * PAGE_STRIDE + position_N % P * W
            key_NW = keys + at_N[:, None] + offset_W[None, :]
            k_NW = gl.load(key_NW, mask=seen_NW, other=0)
            scale_at_N = page_N * SCALE_STRIDE + position_N % P
            pair_N = gl.load(head_scales + scale_at_N, mask=seen_N, other=0)
            v_NW = gl.load(key_NW + K * P * W, mask=seen_NW, other=0)
            stage = block % STAGES
            phase = block // STAGES & 1 ^ 1
            mbarrier.wait(keys_free.index(stage), phase)
            _store_numbers(key_words.index(stage), k_NW, pair_N << 16, NUMBERS)
            fence_async_shared()
            mbarrier.arrive(keys_ready.index(stage), count=1)
            mbarrier.wait(values_free.index(stage), phase)
            _store_numbers(value_words.index(stage), v_NW, pair_N & -65536, NUMBERS)
            fence_async_shared()
            mbarrier.arrive(values_ready.index(stage), count=1)
            block += 1
