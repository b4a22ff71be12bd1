"""Sizes that launches are recorded for: finer where a step is short and padding would show. cuBLAS
rounds to 64 or 128 rows anyway."""

from __future__ import annotations

from bisect import bisect_left

ROW_STEPS = ((8, 0), (64, 8), (256, 16), (512, 32), (1 << 30, 64))
TOKEN_STEPS = ((128, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256), (1 << 30, 512))
"""(up to this size, by this much); 0 doubles."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Sizes of steps of decode rows, and of sampling: 1, 2, 4, 8, 16, 24 … max_rows."""
    return _ladder(1, max_rows, ROW_STEPS)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Sizes of steps with prompt chunks: 16, 32, 48 … max_tokens."""
    return _ladder(16, max_tokens, TOKEN_STEPS)


def bucket_of(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds so many; ValueError if none does."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} is more than the largest captured size, {buckets[-1]}")
    return buckets[index]


def _ladder(first: int, last: int, steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        step = next(step for limit, step in steps if size < limit)
        size += step or size
    return (*sizes, last)
