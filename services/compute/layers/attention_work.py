"""What attention has to do in one step, worked out on the host as index arrays.

Shape legend: R rows, T tokens, B rows of a group, K kv heads, P positions in a page, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

GROUP_BYTES = 8 << 20
"""Keys and values gathered at once: the best of 0.5 to 32 MiB with 16 rows of 128 to 512 tokens;
more falls out of the caches, less is more calls."""

SPLIT_PAGES = 8
"""A decode group is cut where its longest row is this many pages longer, and 1.5 times as long."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the cache, as index arithmetic needs it."""

    kv_heads: int
    page_tokens: int
    page_bytes: int  # one page of one layer, keys and values


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Rows of one query each, padded to the same number of pages."""

    rows: Int64Array  # [B], row is token here
    lengths: Int64Array  # [B]
    gather: Int64Array  # [2 * B * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One row with a chunk of queries: tokens start .. end of the step, positions from q_start."""

    start: int
    end: int
    q_start: int
    gather: Int64Array  # [2 * K * n]
    num_pages: int


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The step's positions, where its keys and values go, and its groups."""

    positions: Int64Array  # [T]
    key_slots: Int64Array  # [T * K], flat position of each head's key; values are K * P further
    clear_pages: Int64Array  # pages first written in this step and not filled
    decode: tuple[DecodeWork, ...]
    prefill: tuple[PrefillWork, ...]


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
        positions=positions,
        key_slots=(base[:, None] + heads).reshape(-1),
        clear_pages=tables[np.nonzero(fresh)[0], last_page[fresh]],
        decode=_decode_groups(ends[:num_decode_rows], num_pages, tables, geometry),
        prefill=tuple(
            PrefillWork(
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
) -> tuple[DecodeWork, ...]:
    """Group rows of similar length, so that one long row does not pad all."""
    groups: list[DecodeWork] = []
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
            DecodeWork(rows, lengths[rows], _gather_index(padded, geometry.kv_heads), longest)
        )
        first = last
    return tuple(groups)


def _gather_index(pages_Bn: Int64Array, kv_heads: int) -> Int64Array:
    """Indices of heads of pages in the order [2, B, K, n]."""
    kinds = np.arange(2)[:, None, None, None] * kv_heads
    heads = np.arange(kv_heads)[None, None, :, None]
    index: Int64Array = pages_Bn[None, :, None, :] * (2 * kv_heads) + (kinds + heads)
    return index.reshape(-1)
