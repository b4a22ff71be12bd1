"""Paged attention equals attention over each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.compute.kernels.kv.kv_format import FP8, INT8, LayerFormat, quantize
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers import eager_attention
from services.compute.layers.eager_attention import (
    AttentionWork,
    EagerAttention,
    Geometry,
    pages_begun,
    plan_attention,
)
from services.compute.layers.page_layers import layers_of
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from tests.spans import span_of, spans_of

CPU = torch.device("cpu")
PAGE_TOKENS, KV_HEADS, GROUP, WIDTH = 4, 2, 3, 8
LAYER_BYTES = 2 * KV_HEADS * PAGE_TOKENS * WIDTH * 4
GEOMETRY = Geometry(PAGE_TOKENS, LAYER_BYTES)
ENTRIES = (torch.float32, FP8, INT8)


def make_cache(spans: Sequence[AttentionSpan], num_pages: int, entry: torch.dtype) -> PagedCache:
    """Layers with windows stay float32 beside others without."""
    formats = {
        span: LayerFormat(
            KV_HEADS, PAGE_TOKENS, WIDTH, torch.float32,
            entry if span.is_full or FULL not in spans else torch.float32,
        )
        for span in spans
    }  # fmt: skip
    sizes = {span: form.num_bytes for span, form in formats.items()}
    return PagedCache(CacheLayout.of(spans, sizes), formats, (num_pages, 0), CPU)


def stored(x: Tensor, form: LayerFormat) -> Tensor:
    """Keys or values as attention reads them."""
    if not form.is_quantized:
        return x
    entries, scales = quantize(x, form.entry)
    return entries.float() * scales.float()[..., None]


class Softmax(NamedTuple):
    softcap: float
    sinks_H: Tensor | None


PLAIN = Softmax(0.0, None)


def reference(
    q: Tensor,
    kv: Sequence[Tensor],
    q_start: int,
    span: AttentionSpan = FULL,
    softmax: Softmax = PLAIN,
) -> Tensor:
    """[Q, H, D] queries at q_start on over [L, K, D] keys and values; q is scaled already."""
    seen = torch.zeros(len(q), len(kv[0]), dtype=torch.bool)
    for index, position in enumerate(range(q_start, q_start + len(q))):
        seen[index, span.first_position(position) : position + 1] = True
    k, v = (x.repeat_interleave(GROUP, dim=1).transpose(0, 1) for x in kv)
    scores = q.transpose(0, 1) @ k.transpose(1, 2)
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    exponentials = scores.masked_fill(~seen, -torch.inf).exp()
    sums = exponentials.sum(-1, keepdim=True)
    if softmax.sinks_H is not None:
        sums += softmax.sinks_H.exp()[:, None, None]
    return (exponentials / sums @ v).transpose(0, 1)


ROW = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(deadline=None)
@given(
    decode=st.lists(st.integers(0, 50), max_size=6),
    prefill=st.lists(ROW, max_size=3),
    spans=st.sampled_from(
        [
            (0,),
            (1,),
            (7,),
            (0, 0),
            (7, 7, 7),
            (7, 0),
            (0, 7, 7, 1),
            (AttentionSpan.chunk(10),),
            (AttentionSpan.chunk(7), 0),
        ]
    ).map(spans_of),
    form=st.sampled_from([(0.0, False), (2.0, False), (0.0, True), (2.0, True)]),
    entry=st.sampled_from(ENTRIES),
    seed=st.integers(0, 99),
)
def test_any_mix_of_rows_in_layers_of_any_spans(
    decode: list[int],
    prefill: list[tuple[int, int]],
    spans: tuple[AttentionSpan, ...],
    form: tuple[float, bool],
    entry: torch.dtype,
    seed: int,
) -> None:
    """Pages that lie wholly before a span are another sequence's by then: here, not a number."""
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    torch.manual_seed(seed)
    total_pages = [-(-(start + count) // PAGE_TOKENS) for start, count in rows]
    layout = make_cache(spans, 0, entry).layout
    num_pages = sum(total_pages) * len(layout.spans) + 1
    *order, strange = torch.randperm(num_pages).tolist()
    tables = np.zeros((len(layout.spans), len(rows), 20), dtype=np.int64)
    for table in tables:
        for row, count in enumerate(total_pages):
            table[row, :count] = [order.pop() for _ in range(count)]
    cache = make_cache(spans, num_pages, entry)
    cache.device_pages.fill_(255)  # not a number in any format
    layers = layers_of(cache)
    sequences = [
        torch.randn(2, len(spans), start + count, KV_HEADS, WIDTH) for start, count in rows
    ]
    softmax = Softmax(form[0], torch.randn(KV_HEADS * GROUP) * 3 if form[1] else None)

    def step(parts: list[tuple[int, int]], which: list[int], num_decode: int) -> None:
        starts, counts = (np.array(column, dtype=np.int64) for column in zip(*parts, strict=True))
        works = tuple(
            plan_attention(starts, counts, table[which], num_decode, GEOMETRY, span)
            for table, span in zip(tables, layout.spans, strict=True)
        )
        attention = EagerAttention(cache, works, layers)
        positions = torch.cat([torch.arange(s, s + c) for s, c in parts])
        assert torch.equal(attention.positions_T, positions)
        for layer, span in enumerate(spans):
            k, v = (
                torch.cat(
                    [
                        sequences[r][i, layer, s : s + c]
                        for r, (s, c) in zip(which, parts, strict=True)
                    ]
                )
                for i in (0, 1)
            )
            queries = torch.randn(len(k), KV_HEADS * GROUP, WIDTH)
            kv = torch.stack((k, v), 1)
            out = attention.attend(layer, queries, kv, *softmax).view_as(queries)
            first = 0
            for r, (s, c) in zip(which, parts, strict=True):
                seen = stored(sequences[r][:, layer, : s + c], cache.formats[span])
                expected = reference(queries[first : first + c], seen, s, span, softmax)
                torch.testing.assert_close(out[first : first + c], expected, rtol=1e-4, atol=1e-5)
                first += c

    before = [r for r, (start, _) in enumerate(rows) if start]
    if before:
        step([(0, rows[r][0]) for r in before], before, 0)
    for table, span in zip(tables, layout.spans, strict=True):
        for row, (start, _) in enumerate(rows):
            table[row, : span.first_position(start) // PAGE_TOKENS] = strange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_attention, "FUSED_POSITIONS", (0, 64, 4096)[seed % 3])
        step(rows, list(range(len(rows))), len(decode))
    assert (cache.device_pages[strange] == 255).all()


def plan(lengths: list[int], window: int = 0) -> AttentionWork:
    tables = np.arange(len(lengths) * 64).reshape(len(lengths), 64)
    starts, ones = np.array(lengths, dtype=np.int64) - 1, np.ones(len(lengths), np.int64)
    return plan_attention(starts, ones, tables, len(lengths), GEOMETRY, span_of(window))


def test_one_long_row_does_not_pad_all() -> None:
    groups = plan([10, 200, 12, 9, 11]).decode
    assert [group.rows.tolist() for group in groups] == [[1], [0, 2, 3, 4]]
    assert [group.pages_Bn.shape for group in groups] == [(1, 50), (4, 3)]


def test_rows_of_nearly_the_same_length_stay_together() -> None:
    assert len(plan([10, 40, 25, 30]).decode) == 1


def test_a_window_makes_all_long_rows_alike() -> None:
    (group,) = plan([10, 200, 12, 9, 131], window=8).decode
    assert group.pages_Bn.shape == (5, 3)
    assert group.lengths.tolist() == [10, 8, 8, 9, 11]


def test_a_group_does_not_outgrow_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_attention, "GROUP_BYTES", 2 * 50 * GEOMETRY.layer_bytes)
    assert [len(group.rows) for group in plan([200] * 5).decode] == [2, 2, 1]


@pytest.mark.parametrize("window", [0, 3])
def test_pages_that_are_filled_in_part_are_cleared_once(window: int) -> None:
    tables = np.arange(40).reshape(4, 10)
    starts, counts = np.array([0, 4, 5, 6]), np.array([6, 4, 1, 3])
    work = plan_attention(starts, counts, tables, 0, GEOMETRY, span_of(window))
    # row 0 leaves page 1 half empty; row 1 fills its page; row 2 goes on in one that was begun;
    # row 3 fills its page 1 and begins page 2
    assert pages_begun(work.pages_T, work.offsets_T, PAGE_TOKENS).tolist() == [1, 32]


def test_a_chunk_reads_from_the_first_page_that_its_first_query_sees() -> None:
    tables = np.arange(100, 120)[None, :]
    for window, first in ((0, 100), (1, 105), (2, 105), (3, 104), (22, 100)):
        work = plan_attention(np.array([21]), np.array([6]), tables, 0, GEOMETRY, span_of(window))
        (row,) = work.prefill
        assert row.pages_1n.tolist() == [list(range(first, 107))]
        assert row.q_start == 21 - 4 * (first - 100)


def test_query_blocks_do_not_change_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(30, 6, WIDTH), torch.randn(30, 2, WIDTH), torch.randn(30, 2, WIDTH)
    table = np.arange(8)[None, :]
    for span in spans_of((0, 9, AttentionSpan.chunk(9))):
        outs = []
        for block in (128, 7):
            monkeypatch.setattr(eager_attention, "QUERY_BLOCK", block)
            cache = make_cache([span], 8, torch.float32)
            work = plan_attention(np.array([0]), np.array([30]), table, 0, GEOMETRY, span)
            attention = EagerAttention(cache, (work,), layers_of(cache))
            outs.append(attention.attend(0, q, torch.stack((k, v), 1), 0.0))
        torch.testing.assert_close(outs[0], outs[1])


LOST = {FP8: (0.02, 0.04), INT8: (0.004, 0.012)}
"""Of attention's output, at least and at most, where keys and values are normally distributed."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entry", [FP8, INT8])
def test_what_is_lost_is_lost_by_rounding_entries_alone(
    entry: torch.dtype, dtype: torch.dtype
) -> None:
    """Against float64 on the entries, within the dtype; and on what they were made of."""
    torch.manual_seed(1)
    kv_heads, width, length = 2, 64, 700
    form = LayerFormat(kv_heads, 16, width, dtype, entry)
    cache = PagedCache(CacheLayout.of([FULL], {FULL: form.num_bytes}), {FULL: form}, (44, 0), CPU)
    q = (torch.randn(length, kv_heads * GROUP, width) / 8).to(dtype)
    k, v = torch.randn(2, length, kv_heads, width).to(dtype)
    geometry, table = Geometry(16, 2 * kv_heads * 16 * width * 4), np.arange(44)[None, :]
    outs = []
    for start, count in ((0, length - 1), (length - 1, 1)):  # a prompt, then a token
        part = slice(start, start + count)
        work = plan_attention(
            np.array([start]), np.array([count]), table, int(count == 1), geometry
        )
        attention = EagerAttention(cache, (work,), layers_of(cache))
        kv = torch.stack((k[part], v[part]), 1)
        outs.append(attention.attend(0, q[part], kv, 0.0))
    out = torch.cat(outs).view_as(q).double()

    def error(k: Tensor, v: Tensor) -> float:
        expected = reference(q.double(), (k.double(), v.double()), 0)
        return float((out - expected).norm() / expected.norm())

    exact = [
        (codes.double() * s.double()[..., None])
        for codes, s in (quantize(k, entry), quantize(v, entry))
    ]
    assert error(*exact) < {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    least, most = LOST[entry]
    assert least < error(k, v) < most
