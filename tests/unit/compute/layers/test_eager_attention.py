"""Paged attention equals attention over each sequence alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.compute.layers import eager_attention
from services.compute.layers.eager_attention import (
    AttentionWork,
    EagerAttention,
    Geometry,
    Workspace,
    plan_attention,
)
from services.compute.layers.paged_cache import CacheLayout, PagedCache

CPU = torch.device("cpu")
PAGE_TOKENS, KV_HEADS, GROUP, WIDTH = 4, 2, 3, 8
LAYER_BYTES = 2 * KV_HEADS * PAGE_TOKENS * WIDTH * 4
GEOMETRY = Geometry(KV_HEADS, 2 * KV_HEADS, PAGE_TOKENS, LAYER_BYTES)


def reference(q: Tensor, k: Tensor, v: Tensor, q_start: int, window: int, softcap: float) -> Tensor:
    """[Q, H, D] queries at q_start on over [L, K, D] keys and values; q is scaled already."""
    keys = torch.arange(len(k))
    queries = torch.arange(q_start, q_start + len(q))[:, None]
    seen = (keys <= queries) & ((keys > queries - window) if window else torch.tensor(True))
    k, v = (x.repeat_interleave(GROUP, dim=1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)


ROW = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(deadline=None)
@given(
    decode=st.lists(st.integers(0, 50), max_size=6),
    prefill=st.lists(ROW, max_size=3),
    windows=st.sampled_from([(0,), (1,), (7,), (0, 0), (7, 7, 7), (7, 0), (0, 7, 7, 1)]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_rows_in_layers_of_any_windows(
    decode: list[int],
    prefill: list[tuple[int, int]],
    windows: tuple[int, ...],
    softcap: float,
    seed: int,
) -> None:
    """Pages that lie wholly before a window are another sequence's by then: here, not a number."""
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    torch.manual_seed(seed)
    layout = CacheLayout.of(windows)
    total_pages = [-(-(start + count) // PAGE_TOKENS) for start, count in rows]
    num_pages = sum(total_pages) * len(layout.windows) + 1
    *order, strange = torch.randperm(num_pages).tolist()
    tables = np.zeros((len(layout.windows), len(rows), 20), dtype=np.int64)
    for table in tables:
        for row, count in enumerate(total_pages):
            table[row, :count] = [order.pop() for _ in range(count)]
    shape = (KV_HEADS, PAGE_TOKENS, WIDTH)
    cache = PagedCache(layout, shape, (num_pages, 0), torch.float32, CPU)
    cache.device_pages.fill_(torch.nan)
    geometry = Geometry(KV_HEADS, cache.page_heads, PAGE_TOKENS, LAYER_BYTES)
    sequences = [
        torch.randn(2, len(windows), start + count, KV_HEADS, WIDTH) for start, count in rows
    ]
    workspace = Workspace(torch.float32)

    def step(spans: list[tuple[int, int]], which: list[int], num_decode: int) -> None:
        starts, counts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        works = tuple(
            plan_attention(starts, counts, table[which], num_decode, geometry, window)
            for table, window in zip(tables, layout.windows, strict=True)
        )
        attention = EagerAttention(cache, works, workspace)
        positions = torch.cat([torch.arange(s, s + c) for s, c in spans])
        assert torch.equal(attention.positions_T, positions)
        for layer, window in enumerate(windows):
            k, v = (
                torch.cat(
                    [
                        sequences[r][i, layer, s : s + c]
                        for r, (s, c) in zip(which, spans, strict=True)
                    ]
                )
                for i in (0, 1)
            )
            queries = torch.randn(len(k), KV_HEADS * GROUP, WIDTH)
            out = attention.attend(layer, queries, k, v, softcap).view_as(queries)
            first = 0
            for r, (s, c) in zip(which, spans, strict=True):
                keys, values = sequences[r][:, layer, : s + c]
                expected = reference(queries[first : first + c], keys, values, s, window, softcap)
                torch.testing.assert_close(out[first : first + c], expected, rtol=1e-4, atol=1e-5)
                first += c

    before = [r for r, (start, _) in enumerate(rows) if start]
    if before:
        step([(0, rows[r][0]) for r in before], before, 0)
    for table, window in zip(tables, layout.windows, strict=True):
        for row, (start, _) in enumerate(rows):
            table[row, : max(0, start - window + 1) // PAGE_TOKENS * bool(window)] = strange
    step(rows, list(range(len(rows))), len(decode))
    assert cache.device_pages[strange].isnan().all()


def plan(lengths: list[int], window: int = 0) -> AttentionWork:
    tables = np.arange(len(lengths) * 64).reshape(len(lengths), 64)
    starts, ones = np.array(lengths, dtype=np.int64) - 1, np.ones(len(lengths), np.int64)
    return plan_attention(starts, ones, tables, len(lengths), GEOMETRY, window)


def test_one_long_row_does_not_pad_all() -> None:
    groups = plan([10, 200, 12, 9, 11]).decode
    assert [group.rows.tolist() for group in groups] == [[1], [0, 2, 3, 4]]
    assert [group.num_pages for group in groups] == [50, 3]


def test_rows_of_nearly_the_same_length_stay_together() -> None:
    assert len(plan([10, 40, 25, 30]).decode) == 1


def test_a_window_makes_all_long_rows_alike() -> None:
    (group,) = plan([10, 200, 12, 9, 131], window=8).decode
    assert group.num_pages == 3
    assert group.lengths.tolist() == [10, 8, 8, 9, 11]


def test_a_group_does_not_outgrow_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_attention, "GROUP_BYTES", 2 * 50 * GEOMETRY.layer_bytes)
    assert [len(group.rows) for group in plan([200] * 5).decode] == [2, 2, 1]


@pytest.mark.parametrize("window", [0, 3])
def test_pages_that_are_filled_in_part_are_cleared_once(window: int) -> None:
    tables = np.arange(40).reshape(4, 10)
    starts, counts = np.array([0, 4, 5, 6]), np.array([6, 4, 1, 3])
    work = plan_attention(starts, counts, tables, 0, GEOMETRY, window)
    # row 0 leaves page 1 half empty; row 1 fills its page; row 2 goes on in one that was begun;
    # row 3 fills its page 1 and begins page 2
    assert work.clear_pages.tolist() == [1, 32]


def pages_read(gather: Tensor) -> npt.NDArray[np.int64]:
    return np.unique(gather.numpy() // GEOMETRY.page_heads)


def test_a_chunk_reads_from_the_first_page_that_its_first_query_sees() -> None:
    tables = np.arange(100, 120)[None, :]
    for window, first in ((0, 100), (1, 105), (2, 105), (3, 104), (22, 100)):
        work = plan_attention(np.array([21]), np.array([6]), tables, 0, GEOMETRY, window)
        (row,) = work.prefill
        assert pages_read(row.gather).tolist() == list(range(first, 107))
        assert (row.num_pages, row.q_start) == (107 - first, 21 - 4 * (first - 100))


def test_query_blocks_do_not_change_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(30, 6, WIDTH), torch.randn(30, 2, WIDTH), torch.randn(30, 2, WIDTH)
    shape, table = (KV_HEADS, PAGE_TOKENS, WIDTH), np.arange(8)[None, :]
    for window in (0, 9):
        outs = []
        for block in (128, 7):
            monkeypatch.setattr(eager_attention, "QUERY_BLOCK", block)
            cache = PagedCache(CacheLayout.of((window,)), shape, (8, 0), torch.float32, CPU)
            work = plan_attention(np.array([0]), np.array([30]), table, 0, GEOMETRY, window)
            attention = EagerAttention(cache, (work,), Workspace(torch.float32))
            outs.append(attention.attend(0, q, k, v, 0.0))
        torch.testing.assert_close(outs[0], outs[1])
