"""What a step's decode attention is cut into, and where its pieces meet.

A row's context is cut into chunks; an item is one chunk of one row, and a program of the kernel
takes one item for one kv head.

Shape legend: I items, R rows, K kv heads, G query heads of a kv head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ITEM_WORDS = 8
ROW, SLOT, CHUNK, SHIFT, LENGTH, FIRST = range(6)
"""Words of an item: its row, the row's slot, the chunk's number in the row, log2 of the chunk's
positions, the row's context length, the place of its first chunk among the partial results."""

MIN_CHUNK = 64
"""A chunk's positions at least: a tile or two of the kernel, below which merging costs more than it
hides."""

EXTRA_PROGRAMS = 132
"""Programs that a step may have beyond one for each row and kv head: one for each of the H200's 132
multiprocessors. Twice as many took 16.7 µs instead of 12.0 for one row of 4096 tokens, 132.8
instead of 126.8 for 256 rows (8B's shape)."""

TILE_TOKENS = 64
TILE_BYTES = 8 << 10
"""Keys of a tile at most: with as many of values and three stages, six programs fit a
multiprocessor. 8B's 256 rows took 128.0 µs with them, 134.4 with four warps, 132.8 with tiles of
twice the size, 146 with four times."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program walks through its chunk."""

    block_tokens: int
    num_warps: int = 2
    num_stages: int = 3
    merge_registers: int = 128  # of a thread, for partial results that a merge has in flight

    @staticmethod
    def of(head_dim: int, element_bytes: int) -> Tiling:
        """The tiling for a cache of this head width and element size."""
        token_bytes = padded(head_dim) * element_bytes
        block_tokens = max(16, min(TILE_TOKENS, TILE_BYTES // token_bytes))
        return Tiling(block_tokens, num_warps=4 if element_bytes == 4 else 2)  # float32 would spill


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Static buffers of a step's decode attention; every layer of the step uses them in turn."""

    items: Tensor  # int32 [I, ITEM_WORDS], the long ones first
    num_items: Tensor  # int32 [1]
    scratch: Tensor  # int32 [3, R padded to a power of two], the plan's own
    partial_IKGD: Tensor  # float32, weighted values of a chunk, not divided by its sum
    partial_stats: Tensor  # float32 [2, I, K, G], a chunk's greatest score (base 2) and its sum
    arrivals_RK: Tensor  # int32, chunks of a row and head that are done; zero between launches
    max_rows: int
    num_kv_heads: int
    max_splits: int
    extra_programs: int
    min_chunk: int
    tiling: Tiling | None

    @staticmethod
    def make(
        max_rows: int,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        max_splits: int = 0,
        *,
        device: torch.device,
        extra_programs: int = EXTRA_PROGRAMS,
        min_chunk: int = MIN_CHUNK,
        tiling: Tiling | None = None,
    ) -> DecodeWork:
        """Buffers for up to max_rows rows of any length.

        With max_splits 0 the chunks of all rows share max_rows + some places, and plan_decode
        chooses their length by the batch. With max_splits > 0 each row has that many places, which
        is what a fixed chunk needs.
        """
        items = max_rows * max_splits or max_rows + _extra_items(extra_programs, num_kv_heads)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeWork(
            items=zeros(items, ITEM_WORDS),
            num_items=zeros(1),
            scratch=zeros(3, padded(max_rows)),
            partial_IKGD=zeros(items, num_kv_heads, group, head_dim, dtype=torch.float32),
            partial_stats=zeros(2, items, num_kv_heads, group, dtype=torch.float32),
            arrivals_RK=zeros(max_rows, num_kv_heads),
            max_rows=max_rows,
            num_kv_heads=num_kv_heads,
            max_splits=max_splits,
            extra_programs=extra_programs,
            min_chunk=min_chunk,
            tiling=tiling,
        )

    @property
    def extra_items(self) -> int:
        """Items that a step may have beyond one for each row, where no chunk is fixed."""
        return _extra_items(self.extra_programs, self.num_kv_heads)

    def item_limit(self, num_rows: int) -> int:
        """Items at most of a step with this many rows: the grid of its launches."""
        return num_rows * self.max_splits or num_rows + self.extra_items


def _extra_items(extra_programs: int, num_kv_heads: int) -> int:
    return -(-extra_programs // num_kv_heads)


def padded(size: int) -> int:
    """The next power of two, at least 16: what a tile of the kernel is made of."""
    return max(16, 1 << (size - 1).bit_length())
