"""How a product of one row is cut into programs, by its shape: pure.

Measured on an H200 for the maps of Llama-3.1-8B and 3.2-1B (matvec_sweep): most are fastest as
programs of one small block whose weights go straight to registers. Those are many, so that each
multiprocessor always has some that wait for memory while others compute. At two rows tensor cores
are as fast, at four twice as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SMS = 132
"""Multiprocessors of an H100 or H200."""

MIN_PROGRAMS = 2 * NUM_SMS
"""Blocks are made smaller until there are as many."""

SHARED_BYTES = 227 << 10
"""Of a multiprocessor, for the programs on it."""

SMALL_ROW_BYTES = 4 << 10
WIDE_ROW_BYTES = 8 << 10
PLAIN_TILE_BYTES = 10 << 10
"""Without padding: two rows of 2,560."""

MAX_ROWS = 8
MAX_WARPS = 8

WARP_BYTES = 1 << 10
"""Of an input row, for each warp: two loads of 16 bytes a thread."""

LONG_OUTPUTS = 50_000
"""From here on few programs walk over many blocks each, loads ahead of their use: 4.49 TB/s of 4.5,
where programs of one block take 1 to 3 % longer."""

LONG_TILE_BYTES = 32 << 10
LONG_ROWS = 4

CODE_TILE_BYTES = 32 << 10
WIDE_CODE_TILE_BYTES = 64 << 10
"""Codes of 8 bits of a block, gates and ups together, where a norm is in the launch; of rows wider
than 4,096 inputs the latter. For its norm a program reads six bytes for each input from the L2
cache: of four rows of 8,192 codes that is more than the codes, and a layer of 70B took 325 µs where
its bytes take 190."""

PLAIN_CODE_TILE_BYTES = 28 << 10
"""Without padding, where none is: two rows of 14,336."""

PLAIN_CODE_ROWS = 2
"""At least. A program reads its input from the L2 cache: of one row of bytes that is twice as much
as the row, and a product of 28,672 inputs took 92 µs where it takes 52 with two rows."""

THREAD_COLUMNS = 32
"""Of codes, where warps suffice: each takes a register for its input, while a norm is computed more
than one."""

PLAIN_THREAD_COLUMNS = 64

OTHER_REGISTERS = 32
"""Of a thread, beside codes and inputs."""

WITHOUT_LIMIT = 1 << 30

LINE_BYTES = 128
LOAD_BYTES = 16
"""Of a thread at once."""


@dataclass(frozen=True, slots=True)
class MatvecConfig:
    rows: int  # output rows of a block, a power of two
    num_warps: int
    num_stages: int = 1  # 1: weights go to registers, else through shared memory
    programs: int = WITHOUT_LIMIT  # at most; they walk over the blocks


def matvec_config(num_out: int, num_in: int, itemsize: int, normed: bool = False) -> MatvecConfig:
    """For a product; larger blocks where its input is normalised first, so that fewer do it."""
    row_bytes = padded(num_in) * itemsize
    if num_out >= LONG_OUTPUTS and row_bytes <= LONG_TILE_BYTES:
        return _long(row_bytes)
    if itemsize == 1:
        if normed:
            return _of_codes(_code_tile(row_bytes) // row_bytes, num_out, num_in, THREAD_COLUMNS)
        rows = max(PLAIN_CODE_ROWS, PLAIN_CODE_TILE_BYTES // num_in)
        return _of_codes(rows, num_out, num_in, PLAIN_THREAD_COLUMNS)
    if normed:
        rows = 8 if row_bytes <= SMALL_ROW_BYTES else 2
        return MatvecConfig(_spread(rows, num_out), _few_warps(row_bytes))
    rows = min(MAX_ROWS, _power_of_two(PLAIN_TILE_BYTES // (num_in * itemsize)))
    return MatvecConfig(_spread(rows, num_out), _busy(_warps(row_bytes), num_in * itemsize))


def gate_up_config(num_gates: int, num_in: int, itemsize: int) -> MatvecConfig:
    """For `num_gates` pairs of a gate and an up row: a block's tile is two of `rows`."""
    row_bytes = padded(num_in) * itemsize
    if itemsize == 1:
        rows = _code_tile(row_bytes) // (2 * row_bytes)
        return _of_codes(rows, num_gates, num_in, THREAD_COLUMNS)
    rows = 2 if row_bytes <= 2 * WIDE_ROW_BYTES else 1
    return MatvecConfig(_spread(rows, num_gates), _few_warps(row_bytes))


def max_registers(config: MatvecConfig, num_in: int, tiles: int, kind: str | None) -> int:
    """Of a thread. With codes (of a kind) that an instruction decodes no more than it needs: with
    more of them the compiler decodes, and so waits for memory, before it asks for the input."""
    two_programs_share = min(255, max(128, 128 * 8 // config.num_warps))
    if kind != "fp8" or config.num_stages > 1:
        return two_programs_share
    columns = -(-padded(num_in) // (32 * config.num_warps))
    codes = tiles * config.rows * columns // 4
    if config.programs < WITHOUT_LIMIT:  # the input is kept from block to block
        codes += columns
    return min(two_programs_share, columns + codes + OTHER_REGISTERS)


def padded(num_in: int) -> int:
    return 1 << max(num_in - 1, 0).bit_length()


def prefetch_lines(num_in: int, itemsize: int) -> int:
    """Cache lines of a row, a power of two."""
    return max(1, padded(num_in) * itemsize // LINE_BYTES)


def _code_tile(row_bytes: int) -> int:
    return WIDE_CODE_TILE_BYTES if row_bytes > SMALL_ROW_BYTES else CODE_TILE_BYTES


def _of_codes(rows: int, num_out: int, num_in: int, columns: int) -> MatvecConfig:
    """Four warps, more for wide inputs, and fewer where blocks are small."""
    rows = _spread(min(MAX_ROWS, _power_of_two(rows)), num_out)
    width = padded(num_in)
    fewest = max(1, min(MAX_WARPS // 2, rows * width // (32 * LOAD_BYTES)))
    return MatvecConfig(rows, max(fewest, min(MAX_WARPS, width // (32 * columns))))


def _warps(row_bytes: int) -> int:
    most = MAX_WARPS if row_bytes <= 4 * WIDE_ROW_BYTES else 2 * MAX_WARPS
    return max(1, min(most, row_bytes // WARP_BYTES))


def _busy(num_warps: int, num_bytes: int) -> int:
    """Half as many where a row ends early in their second loads: most of them would have none."""
    turn_bytes = 32 * LOAD_BYTES * num_warps
    return max(1, num_warps // 2) if turn_bytes < num_bytes < turn_bytes * 3 // 2 else num_warps


def _power_of_two(number: int) -> int:
    """The largest that is no larger, 1 at least."""
    return 1 << max(0, number.bit_length() - 1)


def _few_warps(row_bytes: int) -> int:
    """For up to eight small rows or four wide ones: up to half a kilobyte of them a thread."""
    most = max(MAX_WARPS // 2, min(2 * MAX_WARPS, row_bytes // (2 * WARP_BYTES)))
    return max(1, min(most, row_bytes // WARP_BYTES))


def _spread(rows: int, num_out: int) -> int:
    while rows > 1 and num_out < rows * MIN_PROGRAMS:
        rows //= 2
    return rows


def _long(row_bytes: int) -> MatvecConfig:
    rows = min(LONG_ROWS, LONG_TILE_BYTES // row_bytes)
    # 192 KiB for each multiprocessor either way
    if rows * row_bytes <= LONG_TILE_BYTES // 2:
        return MatvecConfig(rows, _warps(row_bytes), num_stages=4, programs=4 * NUM_SMS)
    return MatvecConfig(rows, _warps(row_bytes), num_stages=3, programs=3 * NUM_SMS)
