"""Attention over the paged cache for the rows of one step, in plain torch.

What there is to do is worked out on the host as index arrays. Keys and values are gathered into a
workspace, head by head, and multiplied as batched matrices: grouped-query heads share them
unrepeated, as further query rows.

Shape legend: T tokens, R rows, H query heads, K kv heads, G = H / K, D head width, B rows of a
group, Q queries of a block, L gathered positions, P positions in a page, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.layers.paged_cache import PagedCache

Int64Array = npt.NDArray[np.int64]

GROUP_BYTES = 8 << 20
"""Keys and values gathered at once: the best of 0.5 to 32 MiB with 16 rows of 128 to 512 tokens;
more falls out of the caches, less is more calls."""

SPLIT_PAGES = 8
"""A decode group is cut where its longest row is this many pages longer, and 1.5 times as long."""


@dataclass(frozen=True, slots=True)
class Geometry:
    kv_heads: int
    page_tokens: int
    page_bytes: int  # one page of one layer, keys and values


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, padded to the same number of pages."""

    rows: Int64Array  # [B], row is token here
    lengths: Int64Array  # [B]
    gather: Tensor  # [2 * B * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with a chunk of queries: tokens start .. end of the step, positions from q_start."""

    start: int
    end: int
    q_start: int
    gather: Tensor  # [2 * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The step's positions, where its keys and values go, and its groups."""

    positions_T: Tensor
    key_slots: Tensor  # [T * K], flat position of each head's key; values are K * P further
    clear_pages: Int64Array  # pages first written in this step and not filled
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillRow, ...]


def plan_attention(
    q_start: Int64Array,
    q_len: Int64Array,
    tables: Int64Array,
    num_decode_rows: int,
    geometry: Geometry,
) -> AttentionWork:
    """Work for rows at q_start [R] with q_len [R] queries and page tables [R, pages]."""
    page_tokens, kv_heads = geometry.page_tokens, geometry.kv_heads
    ends = q_start + q_len
    num_pages = -(-ends // page_tokens)
    row_of_token = np.repeat(np.arange(len(q_len)), q_len)
    first_token = np.cumsum(q_len) - q_len
    positions = np.arange(len(row_of_token)) - (first_token - q_start)[row_of_token]
    pages = tables[row_of_token, positions // page_tokens]
    heads = np.arange(kv_heads) * page_tokens
    base = pages * (2 * kv_heads * page_tokens) + positions % page_tokens
    last_page = (ends - 1) // page_tokens
    fresh = (q_start <= last_page * page_tokens) & (ends % page_tokens != 0)
    return AttentionWork(
        positions_T=torch.from_numpy(positions),
        key_slots=torch.from_numpy((base[:, None] + heads).reshape(-1)),
        clear_pages=tables[np.nonzero(fresh)[0], last_page[fresh]],
        decode=_decode_groups(ends[:num_decode_rows], num_pages, tables, geometry),
        prefill=tuple(
            PrefillRow(
                start=int(first_token[row]),
                end=int(first_token[row] + q_len[row]),
                q_start=int(q_start[row]),
                gather=_gather_index(tables[row : row + 1, : num_pages[row]], kv_heads),
                num_pages=int(num_pages[row]),
            )
            for row in range(num_decode_rows, len(q_len))
        ),
    )


def _decode_groups(
    lengths: Int64Array, num_pages: Int64Array, tables: Int64Array, geometry: Geometry
) -> tuple[DecodeGroup, ...]:
    """Group rows of similar length, so that one long row does not pad all."""
    groups: list[DecodeGroup] = []
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        longest = int(num_pages[order[first]])
        last = first + 1
        room = max(1, GROUP_BYTES // (longest * geometry.page_bytes))
        while last < len(order) and last - first < room:
            pages = int(num_pages[order[last]])
            if longest - pages >= SPLIT_PAGES and 2 * longest > 3 * pages:
                break
            last += 1
        rows = np.sort(order[first:last])
        # padding repeats the row's own first page: another's may hold anything
        index = np.arange(longest)
        padded = np.where(index < num_pages[rows, None], tables[rows, :longest], tables[rows, :1])
        groups.append(
            DecodeGroup(rows, lengths[rows], _gather_index(padded, geometry.kv_heads), longest)
        )
        first = last
    return tuple(groups)


def _gather_index(pages_Bn: Int64Array, kv_heads: int) -> Tensor:
    """Indices of heads of pages in the order [2, B, K, n]."""
    kinds = np.arange(2)[:, None, None, None] * kv_heads
    heads = np.arange(kv_heads)[None, None, :, None]
    index: Int64Array = pages_Bn[None, :, None, :] * (2 * kv_heads) + (kinds + heads)
    return torch.from_numpy(index.reshape(-1))


QUERY_BLOCK = 128
"""Queries of a chunk taken at once: causal work above the diagonal is skipped by the block."""

BLOCK_SCORES = 2 << 20
"""Scores of a block at most, over all kv heads: a long context takes fewer queries at once."""


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: Tensor | slice
    gather: Tensor
    mask_by_window: dict[int, Tensor]  # [B, 1, 1, L], added to the scores


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    first_masked: int  # scores before this position need no mask
    num_positions: int
    mask_QL: Tensor


class Workspace:
    """Memory for gathered pages, kept between steps: fresh memory costs more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(0, dtype=dtype)

    def take(self, num_rows: int, width: int) -> Tensor:
        """[num_rows, width], with whatever was there."""
        size = num_rows * width
        if self._buffer.numel() < size:
            self._buffer = self._buffer.new_empty(size)
        return self._buffer[:size].view(num_rows, width)


class Attention:
    """The attention context of one step: handed to the model, called once a layer."""

    def __init__(
        self, cache: PagedCache, work: AttentionWork, windows: tuple[int, ...], workspace: Workspace
    ) -> None:
        """`windows` are the layers' distinct attention windows; 0 sees everything before."""
        self._cache = cache
        self._workspace = workspace
        self.positions_T = work.positions_T
        self._keys = work.key_slots
        self._values = self._keys + cache.kv_heads * cache.page_tokens
        self._decode = [self._decode_group(group, windows) for group in work.decode]
        self._prefill = [
            (row, {window: self._blocks(row, window) for window in windows}) for row in work.prefill
        ]
        cache.clear(work.clear_pages.tolist())

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int
    ) -> Tensor:
        """Store the step's keys and values, and return [T, H * D]; q comes already scaled."""
        cache = self._cache
        width = cache.head_dim
        cache.write(layer, self._keys, k_TKD.reshape(-1, width))
        cache.write(layer, self._values, v_TKD.reshape(-1, width))
        out_THD = torch.empty_like(q_THD)
        for group in self._decode:
            self._attend_decode(layer, group, window, q_THD, out_THD)
        for row, blocks_by_window in self._prefill:
            self._attend_prefill(layer, row, blocks_by_window[window], q_THD, out_THD)
        return out_THD.flatten(1)

    def _attend_decode(
        self, layer: int, group: _Decode, window: int, q_THD: Tensor, out_THD: Tensor
    ) -> None:
        heads, width = self._cache.kv_heads, self._cache.head_dim
        mask_B11L = group.mask_by_window[window]
        rows, _, _, length = mask_B11L.shape
        keys, values = self._gather(layer, group.gather, rows * heads, length)
        q = q_THD[group.rows].reshape(rows * heads, -1, width)
        scores = torch.bmm(q, keys.transpose(1, 2)).view(rows, heads, -1, length)
        scores += mask_B11L
        weights = torch.softmax(scores, dim=-1).view(rows * heads, -1, length)
        out_THD[group.rows] = torch.bmm(weights, values).view(rows, -1, width)

    def _attend_prefill(
        self,
        layer: int,
        row: PrefillRow,
        blocks: tuple[_Block, ...],
        q_THD: Tensor,
        out_THD: Tensor,
    ) -> None:
        heads, width = self._cache.kv_heads, self._cache.head_dim
        num_positions = row.num_pages * self._cache.page_tokens
        keys, values = self._gather(layer, row.gather, heads, num_positions)
        for block in blocks:
            queries, seen = block.end - block.start, block.num_positions
            q_THD_block = q_THD[block.start : block.end]
            q = q_THD_block.transpose(0, 1).reshape(heads, -1, width)  # [K, G * Q, D]
            scores = torch.bmm(q, keys[:, :seen].transpose(1, 2)).view(-1, queries, seen)
            scores[:, :, block.first_masked :] += block.mask_QL
            weights = torch.softmax(scores, dim=-1).view(heads, -1, seen)
            mixed = torch.bmm(weights, values[:, :seen]).view(-1, queries, width)
            out_THD[block.start : block.end] = mixed.transpose(0, 1)

    def _gather(
        self, layer: int, index: Tensor, num_heads: int, num_positions: int
    ) -> tuple[Tensor, Tensor]:
        cache = self._cache
        space = self._workspace.take(index.shape[0], cache.page_tokens * cache.head_dim)
        cache.gather(layer, index, space)
        both = space.view(2, num_heads, num_positions, cache.head_dim)
        return both[0], both[1]

    def _decode_group(self, group: DecodeGroup, windows: tuple[int, ...]) -> _Decode:
        num_rows, first = len(group.rows), int(group.rows[0])
        consecutive = int(group.rows[-1]) - first + 1 == num_rows
        index_L = torch.arange(group.num_pages * self._cache.page_tokens)
        lengths_B1 = torch.from_numpy(group.lengths)[:, None]
        masks = {}
        for window in windows:
            hidden_BL = index_L >= lengths_B1
            if window:
                hidden_BL |= index_L < lengths_B1 - window
            masks[window] = self._mask(hidden_BL)[:, None, None, :]
        rows = slice(first, first + num_rows) if consecutive else torch.from_numpy(group.rows)
        return _Decode(rows, group.gather, masks)

    def _blocks(self, row: PrefillRow, window: int) -> tuple[_Block, ...]:
        blocks = []
        scores_per_query = self._cache.kv_heads * row.num_pages * self._cache.page_tokens
        step = min(QUERY_BLOCK, max(16, BLOCK_SCORES // scores_per_query))
        for block_start in range(row.start, row.end, step):
            block_end = min(row.end, block_start + step)
            position = row.q_start + block_start - row.start
            seen = position + block_end - block_start
            first_masked = 0 if window else position
            queries_Q1 = torch.arange(position, seen)[:, None]
            keys_L = torch.arange(first_masked, seen)
            hidden_QL = keys_L > queries_Q1
            if window:
                hidden_QL |= keys_L <= queries_Q1 - window
            mask_QL = self._mask(hidden_QL)
            blocks.append(_Block(block_start, block_end, first_masked, seen, mask_QL))
        return tuple(blocks)

    def _mask(self, hidden: Tensor) -> Tensor:
        """To add to scores: minus infinity where they are hidden."""
        mask = torch.zeros(hidden.shape, dtype=self._cache.device_pages.dtype)
        return mask.masked_fill_(hidden, -torch.inf)
