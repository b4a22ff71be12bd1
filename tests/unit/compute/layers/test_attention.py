"""Paged attention equals attention over each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.layers import attention as attention_module
from services.compute.layers.attention import (
    Attention,
    AttentionWork,
    Geometry,
    Workspace,
    plan_attention,
)
from services.compute.layers.paged_cache import PagedCache

CPU = torch.device("cpu")
PAGE_TOKENS, KV_HEADS, GROUP, WIDTH, NUM_PAGES = 4, 2, 3, 8, 64
GEOMETRY = Geometry(KV_HEADS, PAGE_TOKENS, 2 * KV_HEADS * PAGE_TOKENS * WIDTH * 4)


def reference(q, k, v, q_start: int, window: int) -> torch.Tensor:
    """[Q, H, D] queries at q_start on over [L, K, D] keys and values; q is scaled already."""
    keys = torch.arange(len(k))
    queries = torch.arange(q_start, q_start + len(q))[:, None]
    seen = (keys <= queries) & ((keys > queries - window) if window else torch.tensor(True))
    repeated = [x.repeat_interleave(GROUP, dim=1).transpose(0, 1) for x in (k, v)]
    return F.scaled_dot_product_attention(
        q.transpose(0, 1), *repeated, attn_mask=seen, scale=1.0
    ).transpose(0, 1)


ROW = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(deadline=None)
@given(
    decode=st.lists(st.integers(0, 50), max_size=6),
    prefill=st.lists(ROW, max_size=3),
    window=st.sampled_from([0, 1, 7]),
    seed=st.integers(0, 99),
)
def test_any_mix_of_rows(
    decode: list[int], prefill: list[tuple[int, int]], window: int, seed: int
) -> None:
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    torch.manual_seed(seed)
    total_pages = [-(-(start + count) // PAGE_TOKENS) for start, count in rows]
    order = torch.randperm(sum(total_pages)).tolist()
    tables = np.zeros((len(rows), 20), dtype=np.int64)
    for row, count in enumerate(total_pages):
        tables[row, :count] = [order.pop() for _ in range(count)]
    cache = PagedCache((1, KV_HEADS, PAGE_TOKENS, WIDTH), sum(total_pages), 0, torch.float32, CPU)
    cache.device_pages.fill_(torch.nan)
    sequences = [torch.randn(2, start + count, KV_HEADS, WIDTH) for start, count in rows]
    workspace = Workspace(torch.float32)

    def step(spans: list[tuple[int, int]], which: list[int], num_decode: int) -> torch.Tensor:
        starts, counts = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
        work = plan_attention(starts, counts, tables[which], num_decode, GEOMETRY)
        context = Attention(cache, work, (window,), workspace)
        k, v = (
            torch.cat([sequences[r][i, s : s + c] for r, (s, c) in zip(which, spans, strict=True)])
            for i in (0, 1)
        )
        queries = torch.randn(len(k), KV_HEADS * GROUP, WIDTH)
        out = context.attend(0, queries, k, v, window).view_as(queries)
        first = 0
        for r, (s, c) in zip(which, spans, strict=True):
            keys, values = sequences[r][:, : s + c]
            expected = reference(queries[first : first + c], keys, values, s, window)
            torch.testing.assert_close(out[first : first + c], expected, rtol=1e-4, atol=1e-5)
            first += c
        return out

    before = [r for r, (start, _) in enumerate(rows) if start]
    if before:
        step([(0, rows[r][0]) for r in before], before, 0)
    step(rows, list(range(len(rows))), len(decode))


def plan(lengths: list[int]) -> AttentionWork:
    tables = np.arange(len(lengths) * 64).reshape(len(lengths), 64)
    starts = np.array(lengths, dtype=np.int64) - 1
    return plan_attention(starts, np.ones(len(lengths), np.int64), tables, len(lengths), GEOMETRY)


def test_one_long_row_does_not_pad_all() -> None:
    groups = plan([10, 200, 12, 9, 11]).decode
    assert [group.rows.tolist() for group in groups] == [[1], [0, 2, 3, 4]]
    assert [group.num_pages for group in groups] == [50, 3]


def test_rows_of_nearly_the_same_length_stay_together() -> None:
    assert len(plan([10, 40, 25, 30]).decode) == 1


def test_a_group_does_not_outgrow_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "GROUP_BYTES", 2 * 50 * GEOMETRY.page_bytes)
    assert [len(group.rows) for group in plan([200] * 5).decode] == [2, 2, 1]


def test_pages_that_are_filled_in_part_are_cleared_once() -> None:
    tables = np.arange(40).reshape(4, 10)
    starts, counts = np.array([0, 4, 5, 6]), np.array([6, 4, 1, 3])
    work = plan_attention(starts, counts, tables, 0, GEOMETRY)
    # row 0 leaves page 1 half empty; row 1 fills its page; row 2 goes on in one that was begun;
    # row 3 fills its page 1 and begins page 2
    assert work.clear_pages.tolist() == [1, 32]


def test_query_blocks_do_not_change_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(30, 6, WIDTH), torch.randn(30, 2, WIDTH), torch.randn(30, 2, WIDTH)
    outs = []
    for block in (128, 7):
        monkeypatch.setattr(attention_module, "QUERY_BLOCK", block)
        cache = PagedCache((1, KV_HEADS, PAGE_TOKENS, WIDTH), 8, 0, torch.float32, CPU)
        work = plan_attention(np.array([0]), np.array([30]), np.arange(8)[None, :], 0, GEOMETRY)
        context = Attention(cache, work, (0,), Workspace(torch.float32))
        outs.append(context.attend(0, q, k, v, 0))
    torch.testing.assert_close(outs[0], outs[1])


def test_pages_come_back_from_the_host_as_they_went() -> None:
    cache = PagedCache((3, KV_HEADS, PAGE_TOKENS, WIDTH), 4, 2, torch.float32, CPU)
    cache.device_pages.normal_()
    before = cache.device_pages.clone()
    cache.swap_out([(1, 0), (3, 1)])
    cache.device_pages[:, [1, 3]] = 0.0
    cache.swap_in([(0, 2), (1, 0)])
    assert torch.equal(cache.device_pages[:, 2], before[:, 1])
    assert torch.equal(cache.device_pages[:, 0], before[:, 3])
