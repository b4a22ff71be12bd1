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
    page_heads: int  # of all layers of a page, keys and values
    page_tokens: int
    layer_bytes: int  # of one page, keys and values


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, padded to the same number of pages."""

    rows: Int64Array  # [B], row is token here
    lengths: Int64Array  # [B], of what is gathered: from the first page that the window reaches
    gather: Tensor  # [2 * B * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with a chunk of queries: tokens start .. end of the step, positions from q_start."""

    start: int
    end: int
    q_start: int  # counted from the first gathered position
    gather: Tensor  # [2 * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What one cache group's layers do in a step: where keys and values go, and the rows."""

    window: int
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
    window: int = 0,
) -> AttentionWork:
    """Work for rows at q_start [R] with q_len [R] queries and page tables [R, pages].

    Pages wholly before a window are not read: they may be another sequence's by now.
    """
    page_tokens, kv_heads = geometry.page_tokens, geometry.kv_heads
    ends = q_start + q_len
    num_pages = -(-ends // page_tokens)
    first_page = np.maximum(q_start - window + 1, 0) // page_tokens if window else q_start * 0
    row_of_token = np.repeat(np.arange(len(q_len)), q_len)
    first_token = np.cumsum(q_len) - q_len
    positions = np.arange(len(row_of_token)) - (first_token - q_start)[row_of_token]
    pages = tables[row_of_token, positions // page_tokens]
    heads = np.arange(kv_heads) * page_tokens
    base = pages * (geometry.page_heads * page_tokens) + positions % page_tokens
    last_page = (ends - 1) // page_tokens
    fresh = (q_start <= last_page * page_tokens) & (ends % page_tokens != 0)
    return AttentionWork(
        window=window,
        positions_T=torch.from_numpy(positions),
        key_slots=torch.from_numpy((base[:, None] + heads).reshape(-1)),
        clear_pages=tables[np.nonzero(fresh)[0], last_page[fresh]],
        decode=_decode_groups(
            ends[:num_decode_rows], first_page[:num_decode_rows], tables, geometry
        ),
        prefill=tuple(
            PrefillRow(
                start=int(first_token[row]),
                end=int(first_token[row] + q_len[row]),
                q_start=int(q_start[row] - first_page[row] * page_tokens),
                gather=_gather_index(
                    tables[row : row + 1, first_page[row] : num_pages[row]], geometry
                ),
                num_pages=int(num_pages[row] - first_page[row]),
            )
            for row in range(num_decode_rows, len(q_len))
        ),
    )


def _decode_groups(
    ends: Int64Array, first_page: Int64Array, tables: Int64Array, geometry: Geometry
) -> tuple[DecodeGroup, ...]:
    """Group rows of similar length, so that one long row does not pad all."""
    lengths = ends - first_page * geometry.page_tokens
    num_pages = -(-lengths // geometry.page_tokens)
    groups: list[DecodeGroup] = []
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        longest = int(num_pages[order[first]])
        last = first + 1
        room = max(1, GROUP_BYTES // (longest * geometry.layer_bytes))
        while last < len(order) and last - first < room:
            pages = int(num_pages[order[last]])
            if longest - pages >= SPLIT_PAGES and 2 * longest > 3 * pages:
                break
            last += 1
        rows = np.sort(order[first:last])
        # padding repeats the row's own last page: another's may hold anything
        index = np.minimum(np.arange(longest), num_pages[rows, None] - 1) + first_page[rows, None]
        padded = tables[rows[:, None], index]
        groups.append(DecodeGroup(rows, lengths[rows], _gather_index(padded, geometry), longest))
        first = last
    return tuple(groups)


def _gather_index(pages_Bn: Int64Array, geometry: Geometry) -> Tensor:
    """Indices of heads of pages in the order [2, B, K, n]."""
    kinds = np.arange(2)[:, None, None, None] * geometry.kv_heads
    heads = np.arange(geometry.kv_heads)[None, None, :, None]
    index: Int64Array = pages_Bn[None, :, None, :] * geometry.page_heads + (kinds + heads)
    return torch.from_numpy(index.reshape(-1))


QUERY_BLOCK = 128
"""Queries of a chunk taken at once: causal work above the diagonal is skipped by the block."""

BLOCK_SCORES = 2 << 20
"""Scores of a block at most, over all kv heads: a long context takes fewer queries at once."""


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: Tensor | slice
    gather: Tensor
    mask_B11L: Tensor  # added to the scores


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    first_masked: int  # scores before this position need no mask
    num_positions: int
    mask_QL: Tensor


@dataclass(frozen=True, slots=True)
class _Work:
    """A cache group's share of a step."""

    keys: Tensor  # [T * K], flat positions
    values: Tensor
    decode: tuple[_Decode, ...]
    prefill: tuple[tuple[PrefillRow, tuple[_Block, ...]], ...]


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


class EagerAttention:
    """Attention of one step, called once a layer."""

    def __init__(
        self, cache: PagedCache, works: tuple[AttentionWork, ...], workspace: Workspace
    ) -> None:
        """`works` are those of the cache's groups."""
        self._cache = cache
        self._workspace = workspace
        self.positions_T = works[0].positions_T
        self._works = [
            _Work(
                keys=work.key_slots,
                values=work.key_slots + cache.kv_heads * cache.page_tokens,
                decode=tuple(self._decode_group(group, work.window) for group in work.decode),
                prefill=tuple((row, self._blocks(row, work.window)) for row in work.prefill),
            )
            for work in works
        ]
        for work in works:
            cache.clear(work.clear_pages.tolist())

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, softcap: float
    ) -> Tensor:
        """Store the step's keys and values, and return [T, H * D]; q comes already scaled."""
        cache, work = self._cache, self._works[self._cache.layout.places[layer].group]
        width = cache.head_dim
        cache.write(layer, work.keys, k_TKD.reshape(-1, width))
        cache.write(layer, work.values, v_TKD.reshape(-1, width))
        out_THD = torch.empty_like(q_THD)
        for group in work.decode:
            self._attend_decode(layer, group, softcap, q_THD, out_THD)
        for row, blocks in work.prefill:
            self._attend_prefill(layer, row, blocks, softcap, q_THD, out_THD)
        return out_THD.flatten(1)

    def _attend_decode(
        self, layer: int, group: _Decode, softcap: float, q_THD: Tensor, out_THD: Tensor
    ) -> None:
        heads, width = self._cache.kv_heads, self._cache.head_dim
        rows, _, _, length = group.mask_B11L.shape
        keys, values = self._gather(layer, group.gather, rows * heads, length)
        q = q_THD[group.rows].reshape(rows * heads, -1, width)
        scores = torch.bmm(q, keys.transpose(1, 2)).view(rows, heads, -1, length)
        scores = _capped(scores, softcap)
        scores += group.mask_B11L
        weights = torch.softmax(scores, dim=-1).view(rows * heads, -1, length)
        out_THD[group.rows] = torch.bmm(weights, values).view(rows, -1, width)

    def _attend_prefill(
        self,
        layer: int,
        row: PrefillRow,
        blocks: tuple[_Block, ...],
        softcap: float,
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
            scores = _capped(scores, softcap)
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

    def _decode_group(self, group: DecodeGroup, window: int) -> _Decode:
        num_rows, first = len(group.rows), int(group.rows[0])
        consecutive = int(group.rows[-1]) - first + 1 == num_rows
        index_L = torch.arange(group.num_pages * self._cache.page_tokens)
        lengths_B1 = torch.from_numpy(group.lengths)[:, None]
        hidden_BL = index_L >= lengths_B1
        if window:
            hidden_BL |= index_L < lengths_B1 - window
        mask_B11L = self._mask(hidden_BL)[:, None, None, :]
        rows = slice(first, first + num_rows) if consecutive else torch.from_numpy(group.rows)
        return _Decode(rows, group.gather, mask_B11L)

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


def _capped(scores: Tensor, softcap: float) -> Tensor:
    """Scores between -softcap and softcap (Gemma 2); without one, as they are."""
    return torch.tanh(scores.div_(softcap)).mul_(softcap) if softcap else scores
