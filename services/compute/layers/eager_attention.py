"""Attention over the paged cache for the rows of one step, in plain torch.

What there is to do is worked out on the host as index arrays. Keys and values are gathered into a
workspace, head by head, and multiplied as batched matrices: grouped-query heads share them
unrepeated, as further query rows.

Shape legend: T tokens, R rows, H query heads, K kv heads, G = H / K, D head width, B rows of a
group, Q queries of a block, L gathered positions, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.distributed.context import ALL_HERE, StoredTokens
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.page_layers import Gathered, Int64Array, PageLayers
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.widened import bmm

GROUP_BYTES = 8 << 20
"""Keys and values gathered at once: the best of 0.5 to 32 MiB with 16 rows of 128 to 512 tokens;
more falls out of the caches, less is more calls."""

SPLIT_PAGES = 8
"""A decode group is cut where its longest row is this many pages longer, and 1.5 times as long."""


@dataclass(frozen=True, slots=True)
class Geometry:
    page_tokens: int
    layer_bytes: int  # of one page, keys and values as they are multiplied


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query each, padded to the same number of pages."""

    rows: Int64Array  # [B], row is token here
    lengths: Int64Array  # [B], of what is gathered: from the first page with what a query sees
    hidden: Int64Array  # [B], positions at its beginning that no query sees
    pages_Bn: Int64Array


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row with a chunk of queries: tokens start .. end of the step, positions from q_start."""

    start: int
    end: int
    q_start: int  # counted from the first gathered position
    first_position: int  # which that is
    pages_1n: Int64Array


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """What one cache group's layers do in a step: where keys and values go, and the rows."""

    span: AttentionSpan
    positions_T: Tensor
    pages_T: Int64Array  # where keys and values go
    offsets_T: Int64Array  # in these
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillRow, ...]


def plan_attention(
    q_start: Int64Array,
    q_len: Int64Array,
    tables: Int64Array,
    num_decode_rows: int,
    geometry: Geometry,
    span: AttentionSpan = FULL,
) -> AttentionWork:
    """Work for rows at q_start [R] with q_len [R] queries and page tables [R, pages].

    Pages wholly before what a row sees are not read: they may be another sequence's by now.
    """
    page_tokens = geometry.page_tokens
    ends = q_start + q_len
    num_pages = -(-ends // page_tokens)
    first_seen = span.first_position(q_start)
    first_page = first_seen // page_tokens
    base = first_page * page_tokens
    row_of_token = np.repeat(np.arange(len(q_len)), q_len)
    first_token = np.cumsum(q_len) - q_len
    positions = np.arange(len(row_of_token)) - (first_token - q_start)[row_of_token]
    return AttentionWork(
        span=span,
        positions_T=torch.from_numpy(positions),
        pages_T=tables[row_of_token, positions // page_tokens],
        offsets_T=positions % page_tokens,
        decode=_decode_groups(
            ends[:num_decode_rows], first_seen[:num_decode_rows], tables, geometry
        ),
        prefill=tuple(
            PrefillRow(
                start=int(first_token[row]),
                end=int(first_token[row] + q_len[row]),
                q_start=int(q_start[row] - base[row]),
                first_position=int(base[row]),
                pages_1n=tables[row : row + 1, first_page[row] : num_pages[row]],
            )
            for row in range(num_decode_rows, len(q_len))
        ),
    )


def pages_begun(pages_T: Int64Array, offsets_T: Int64Array, page_tokens: int) -> Int64Array:
    """Pages of which these places are the first and not the last."""
    begun: Int64Array = pages_T[offsets_T == 0]
    if len(begun):
        begun = begun[~np.isin(begun, pages_T[offsets_T == page_tokens - 1])]
    return begun


def _decode_groups(
    ends: Int64Array, first_seen: Int64Array, tables: Int64Array, geometry: Geometry
) -> tuple[DecodeGroup, ...]:
    """Group rows of similar length, so that one long row does not pad all."""
    first_page, hidden = np.divmod(first_seen, geometry.page_tokens)
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
        groups.append(DecodeGroup(rows, lengths[rows], hidden[rows], tables[rows[:, None], index]))
        first = last
    return tuple(groups)


FUSED_POSITIONS = 4096
"""Up to so many gathered keys, of all rows and kv heads, torch's fused attention is faster than
products and a softmax: a row of 64 positions 4.2 times with 4 kv heads, of 256 1.8 times, of 1,024
1.2; beyond, it takes up to 1.45 times as long (bfloat16 on a Xeon with AMX)."""

QUERY_BLOCK = 128
"""Queries of a chunk taken at once: causal work above the diagonal is skipped by the block."""

BLOCK_SCORES = 2 << 20
"""Scores of a block at most, over all kv heads: a long context takes fewer queries at once."""


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: Tensor | slice
    index: Tensor  # to gather by
    mask_B11L: Tensor  # added to the scores


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    first_masked: int  # scores before this position need no mask
    num_positions: int
    mask_QL: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    index: Tensor
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """A cache group's share of a step."""

    layers: PageLayers
    slots: tuple[Tensor, ...]
    decode: tuple[_Decode, ...]
    prefill: tuple[_Prefill, ...]


@dataclass(frozen=True, slots=True)
class _Softmax:
    """How a layer's scores become weights: most have neither."""

    softcap: float
    sinks_H: Tensor | None

    @property
    def is_plain(self) -> bool:
        return not self.softcap and self.sinks_H is None

    def capped(self, scores: Tensor) -> Tensor:
        """Scores between -softcap and softcap (Gemma 2); without one, as they are."""
        softcap = self.softcap
        return torch.tanh(scores.div_(softcap)).mul_(softcap) if softcap else scores

    def weights(self, scores_HQL: Tensor) -> Tensor:
        """Of the scores, which may be of several rows; a sink takes its share and is left out."""
        if self.sinks_H is None:
            return torch.softmax(scores_HQL, dim=-1)
        sinks = self.sinks_H.to(scores_HQL.dtype)[:, None, None]
        sinks = sinks.expand(*scores_HQL.shape[:-1], 1)
        return torch.softmax(torch.cat((scores_HQL, sinks), dim=-1), dim=-1)[..., :-1]


class EagerAttention:
    """Attention of one step, called once a layer."""

    def __init__(
        self,
        cache: PagedCache,
        works: tuple[AttentionWork, ...],
        layers: tuple[PageLayers, ...],
        tokens: StoredTokens = ALL_HERE,
    ) -> None:
        """`works` and `layers` are those of the cache's groups."""
        self._tokens = tokens
        self._places = cache.layout.places
        self._form = next(iter(cache.formats.values()))  # what all have in common
        self.positions_T = works[0].positions_T
        places = [self._places_written(work) for work in works]
        self._works = [
            _Work(
                layers=its_layers,
                slots=its_layers.slots(pages_T, offsets_T),
                decode=tuple(
                    self._decode_group(group, its_layers.index(group.pages_Bn))
                    for group in work.decode
                ),
                prefill=tuple(
                    _Prefill(its_layers.index(row.pages_1n), self._blocks(row, work.span))
                    for row in work.prefill
                ),
            )
            for work, its_layers, (pages_T, offsets_T) in zip(works, layers, places, strict=True)
        ]
        for written in places:
            cache.clear(pages_begun(*written, self._form.page_tokens).tolist())

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        kv_T2KD: Tensor,
        softcap: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, and return [T, H * D]; q comes already scaled.

        Latents [T, 1, 1, D] are multiplied as they are, by queries that have been absorbed; what is
        returned of each head is as wide as they are without their rotated part.
        """
        softmax = _Softmax(softcap, sinks_H)
        group, number = self._places[layer]
        work = self._works[group]
        work.layers.write(number, work.slots, self._tokens.completed(kv_T2KD))
        if len(work.decode) == 1 and not work.prefill:  # so that a single token is copied no more
            rows = work.decode[0]
            gathered = work.layers.gather(number, rows.index, len(q_THD))
            return self._attend_decode(gathered, rows, softmax, q_THD)
        out_THD = q_THD.new_empty(*q_THD.shape[:2], self._form.value_dim)
        out_TC = out_THD.flatten(1)
        for rows in work.decode:
            gathered = work.layers.gather(number, rows.index, len(rows.mask_B11L))
            out_TC[rows.rows] = self._attend_decode(gathered, rows, softmax, q_THD[rows.rows])
        for row in work.prefill:
            gathered = work.layers.gather(number, row.index, 1)
            self._attend_prefill(gathered, row.blocks, softmax, q_THD, out_THD)
        return out_TC

    def _attend_decode(
        self, gathered: Gathered, group: _Decode, softmax: _Softmax, q_BHD: Tensor
    ) -> Tensor:
        """[B, H * D]"""
        keys_BKLD, values_BKLD, key_scales, _ = gathered
        rows, heads, length, width = keys_BKLD.shape
        q_BKGD = q_BHD.view(rows, heads, -1, width)
        is_small = rows * heads * length <= FUSED_POSITIONS
        if is_small and key_scales is None and softmax.is_plain:
            mixed = F.scaled_dot_product_attention(
                q_BKGD, keys_BKLD, values_BKLD, group.mask_B11L, scale=1.0
            )
            return mixed.reshape(rows, -1)
        q, keys = q_BKGD.flatten(0, 1), keys_BKLD.flatten(0, 1)
        scores = bmm(q, keys.transpose(1, 2)).view(rows, heads, -1, length)
        scores = softmax.capped(_times(scores, key_scales))
        scores += group.mask_B11L
        weights = softmax.weights(scores.view(rows, -1, 1, length)).view(scores.shape)
        weights = _times(weights, gathered.value_scales).to(q.dtype)
        mixed = bmm(weights.view(rows * heads, -1, length), values_BKLD.flatten(0, 1))
        return mixed.view(rows, -1)

    def _attend_prefill(
        self,
        gathered: Gathered,
        blocks: tuple[_Block, ...],
        softmax: _Softmax,
        q_THD: Tensor,
        out_THD: Tensor,
    ) -> None:
        heads, width = self._form.kv_heads, self._form.head_dim
        for block in blocks:
            queries, seen = block.end - block.start, block.num_positions
            q_THD_block = q_THD[block.start : block.end]
            q = q_THD_block.transpose(0, 1).reshape(heads, -1, width)  # [K, G * Q, D]
            keys, values, key_scales, value_scales = gathered.up_to(seen)
            scores = bmm(q, keys[0].transpose(1, 2)).view(1, heads, -1, seen)
            scores = softmax.capped(_times(scores, key_scales))
            by_query = scores.view(-1, queries, seen)
            by_query[:, :, block.first_masked :] += block.mask_QL
            weights = softmax.weights(by_query).view(scores.shape)
            weights = _times(weights, value_scales).to(q.dtype)
            mixed = bmm(weights.view(heads, -1, seen), values[0])
            mixed = mixed.view(-1, queries, self._form.value_dim)
            out_THD[block.start : block.end] = mixed.transpose(0, 1)

    def _places_written(self, work: AttentionWork) -> tuple[Int64Array, Int64Array]:
        """Pages and places in them, of all tokens that are stored."""
        completed = self._tokens.completed
        pages_T, offsets_T = map(torch.from_numpy, (work.pages_T, work.offsets_T))
        return completed(pages_T).numpy(), completed(offsets_T).numpy()

    def _decode_group(self, group: DecodeGroup, index: Tensor) -> _Decode:
        num_rows, first = len(group.rows), int(group.rows[0])
        consecutive = int(group.rows[-1]) - first + 1 == num_rows
        index_L = torch.arange(group.pages_Bn.shape[1] * self._form.page_tokens)
        lengths_B1 = torch.from_numpy(group.lengths)[:, None]
        first_B1 = torch.from_numpy(group.hidden)[:, None]
        mask_B11L = self._mask((index_L >= lengths_B1) | (index_L < first_B1))[:, None, None, :]
        rows = slice(first, first + num_rows) if consecutive else torch.from_numpy(group.rows)
        return _Decode(rows, index, mask_B11L)

    def _blocks(self, row: PrefillRow, span: AttentionSpan) -> tuple[_Block, ...]:
        blocks = []
        scores_per_query = self._form.kv_heads * row.pages_1n.shape[1] * self._form.page_tokens
        step = min(QUERY_BLOCK, max(16, BLOCK_SCORES // scores_per_query))
        for block_start in range(row.start, row.end, step):
            block_end = min(row.end, block_start + step)
            position = row.q_start + block_start - row.start
            seen = position + block_end - block_start
            queries_Q1 = torch.arange(position, seen)[:, None]
            first_Q1 = span.first_position(queries_Q1 + row.first_position) - row.first_position
            sees_all = int(first_Q1[-1]) <= 0  # the last one, and so does each before it
            first_masked = position if sees_all else 0
            keys_L = torch.arange(first_masked, seen)
            mask_QL = self._mask((keys_L > queries_Q1) | (keys_L < first_Q1))
            blocks.append(_Block(block_start, block_end, first_masked, seen, mask_QL))
        return tuple(blocks)

    def _mask(self, hidden: Tensor) -> Tensor:
        """To add to scores: minus infinity where they are hidden."""
        mask = torch.zeros(hidden.shape, dtype=self._form.dtype)
        return mask.masked_fill_(hidden, -torch.inf)


def _times(scores: Tensor, scales: Tensor | None) -> Tensor:
    """Scores or probabilities times scales, in float32; without any, as they are."""
    return scores if scales is None else scores.float().mul_(scales)
