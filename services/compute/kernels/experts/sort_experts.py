"""The pairs of a row and an expert it goes to, in the order of experts, and a map of their tiles.

Made on the device, by one launch: a program for each expert counts the pairs of experts before its
own, and lists its own from there on, in the order in which they come. So the order is one, whatever
ends first. Pairs of experts that another rank has are in no list.

The programs of a product have a tile of rows each, which is of one expert: tiles follow
from counts that the host does not know. It launches as many as there can be; expert x's first is
number `pairs before // block + min(x, pairs before)`, so that each expert has room for its last
tile, which is not full, and no program need know the others' tiles. Tiles without pairs say so.

Shape legend: T rows, K experts of a row, R = T * K pairs, X experts, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch

MAX_CHUNK = 4096
"""Pairs that a program looks at together."""

NO_EXPERT = -1

MIN_BLOCK_ROWS = 16
"""Columns of the smallest product of tensor cores that Triton makes."""


@triton.jit
def tile_rows(order_ptr, tile_ptr, tile, num_tiles, BLOCK_T: tl.constexpr, K: tl.constexpr):
    """Of a tile that has an expert: its first place, which of its rows there are, and where they
    come from and go to. Rows of tokens (K: experts of each) become those of places in the order;
    with K of 0 those of places become those of pairs."""
    first = tl.load(tile_ptr + num_tiles + tile)
    end = tl.load(tile_ptr + 2 * num_tiles + tile)
    r = first + tl.arange(0, BLOCK_T)
    is_row_T = r < end
    pair_T = tl.load(order_ptr + r, mask=is_row_T, other=0)
    in_row_T = r
    out_row_T = pair_T
    if K > 0:
        in_row_T = pair_T // K
        out_row_T = r
    return first, is_row_T, in_row_T, out_row_T


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOrder:
    """Pairs by expert. Pair r is the expert r % K that row r // K has chosen."""

    num_experts: int
    block_rows: int  # of a tile
    num_pairs: int
    order_R: Tensor  # int32: the pairs
    tiles_3N: Tensor  # int32: a tile's expert, first place in the order, and end; `NO_EXPERT`: none

    @staticmethod
    def num_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
        return num_pairs // block_rows + min(num_experts, num_pairs)

    @staticmethod
    def num_bytes(num_pairs: int, num_experts: int, block_rows: int) -> int:
        """Of the memory that `within` cuts up."""
        return 4 * (num_pairs + 3 * ExpertOrder.num_tiles(num_pairs, num_experts, block_rows))

    @staticmethod
    def within(memory: Tensor, num_pairs: int, num_experts: int, block_rows: int) -> ExpertOrder:
        """In the first bytes of `memory`, which is uint8 and begins at a multiple of 16."""
        size = ExpertOrder.num_bytes(num_pairs, num_experts, block_rows)
        numbers = memory[:size].view(torch.int32)
        order_R, tiles_3N = numbers[:num_pairs], numbers[num_pairs:].view(3, -1)
        return ExpertOrder(num_experts, block_rows, num_pairs, order_R, tiles_3N)

    @staticmethod
    def of_one_token(top_k: int, num_experts: int, device: torch.device) -> ExpertOrder:
        """A tile for each of its pairs, whose experts it says by writing the first row of tiles."""
        pairs = torch.arange(top_k, dtype=torch.int32, device=device)
        tiles_3N = torch.stack((torch.zeros_like(pairs), pairs, pairs + 1))
        return ExpertOrder(num_experts, MIN_BLOCK_ROWS, top_k, pairs, tiles_3N)

    @staticmethod
    def empty(
        num_pairs: int, num_experts: int, block_rows: int, device: torch.device
    ) -> ExpertOrder:
        size = ExpertOrder.num_bytes(num_pairs, num_experts, block_rows)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return ExpertOrder.within(memory, num_pairs, num_experts, block_rows)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    expert_ptr, order_ptr, tile_ptr, num_pairs, num_tiles,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    r = tl.arange(0, CHUNK)
    before, own = tl.zeros((CHUNK,), dtype=tl.int32), tl.zeros((CHUNK,), dtype=tl.int32)
    for chunk in tl.range(0, CHUNKS):
        pair = chunk * CHUNK + r
        expert_R = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=0x7FFFFFFF)
        before += (expert_R < expert).to(tl.int32)
        own += (expert_R == expert).to(tl.int32)
    begin = tl.sum(before)
    end = begin + tl.sum(own)

    place = begin
    for chunk in tl.range(0, CHUNKS):
        pair = chunk * CHUNK + r
        expert_R = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=0x7FFFFFFF)
        is_own_R = expert_R == expert
        rank_R = tl.cumsum(is_own_R.to(tl.int32), axis=0)
        tl.store(order_ptr + place + rank_R - 1, pair, mask=is_own_R)
        place += tl.sum(is_own_R.to(tl.int32))

    first_tile = begin // BLOCK_R + tl.minimum(expert, begin)
    end_tile = end // BLOCK_R + tl.minimum(expert + 1, end)
    if expert == tl.num_programs(0) - 1:  # behind it are pairs of experts that are elsewhere
        end_tile = num_tiles
    n = tl.arange(0, 64)
    for first in range(first_tile, end_tile, 64):
        tile = first + n
        first_row = begin + (tile - first_tile) * BLOCK_R
        is_tile = tile < end_tile
        tl.store(tile_ptr + tile, tl.where(first_row < end, expert, -1), mask=is_tile)
        tl.store(tile_ptr + num_tiles + tile, first_row, mask=is_tile)
        end_row = tl.minimum(first_row + BLOCK_R, end)
        tl.store(tile_ptr + 2 * num_tiles + tile, end_row, mask=is_tile)


def sort_experts(experts_TK: Tensor, order: ExpertOrder, *, pdl: bool = False) -> None:
    """Write the order of these experts' pairs, and its tiles."""
    num_pairs = order.num_pairs
    assert experts_TK.is_contiguous() and experts_TK.numel() == num_pairs
    chunk = min(MAX_CHUNK, max(32, triton.next_power_of_2(num_pairs)))
    _sort_kernel[(order.num_experts,)](
        experts_TK,
        order.order_R,
        order.tiles_3N,
        num_pairs,
        order.tiles_3N.shape[1],
        CHUNK=chunk,
        CHUNKS=triton.cdiv(num_pairs, chunk),
        BLOCK_R=order.block_rows,
        num_warps=max(1, min(8, chunk // 128)),
        **dependent_launch(pdl, experts_TK),
    )


def sort_experts_reference(experts_TK: Tensor, order: ExpertOrder) -> None:
    """By a stable sort."""
    expert_R, block = experts_TK.flatten().long(), order.block_rows
    order.order_R.copy_(expert_R.argsort(stable=True))
    order.tiles_3N[0].fill_(NO_EXPERT)
    is_here_R = expert_R < order.num_experts
    begin = 0
    counts = expert_R[is_here_R].bincount(minlength=order.num_experts).tolist()
    for expert, count in enumerate(counts):
        tile = begin // block + min(expert, begin)
        for first in range(begin, begin + count, block):
            end = min(first + block, begin + count)
            order.tiles_3N[:, tile] = torch.tensor([expert, first, end])
            tile += 1
        begin += count
