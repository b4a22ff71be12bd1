"""Attention of rows by compiled kernels is what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import LayerFormat
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers import row_attention
from services.compute.layers.eager_attention import EagerAttention, Geometry
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.row_attention import RowAttention, RowAttentions
from services.compute.layers.step_attention import EagerAttentions, StepAttentions

PAGE_TOKENS, KV_HEADS = 4, 2
POSITIONS = np.array([0, 3, 4, 37, 12])
SPANS = (FULL, AttentionSpan.window(7), AttentionSpan.chunk(10), FULL)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_cache(dtype: torch.dtype, width: int) -> PagedCache:
    form = LayerFormat(KV_HEADS, PAGE_TOKENS, width, dtype, dtype)
    layout = CacheLayout.of(SPANS, dict.fromkeys(SPANS, form.num_bytes))
    num_pages = len(layout.spans) * len(POSITIONS) * 10
    cache = PagedCache(layout, dict.fromkeys(SPANS, form), (num_pages, 0), torch.device("cpu"))
    cache.device_pages.view(dtype).normal_()
    return cache


def attended(
    make: StepAttentions, cache: PagedCache, softcap: float, sinks: bool, group: int = 3
) -> list[Tensor]:
    """Of a step, by layer, with so many heads to a key; queries and keys lie side by side, as a
    product leaves them."""
    form, rows = next(iter(cache.formats.values())), len(POSITIONS)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(cache.device_pages), generator=generator).numpy()
    tables = order.reshape(len(cache.layout.spans), rows, 10).astype(np.int64)
    attention = make(POSITIONS, np.ones(rows, np.int64), tables, rows)
    outs = []
    for layer in range(len(SPANS)):
        heads = KV_HEADS * (group + 2)
        qkv = torch.randn(rows, heads, form.head_dim, generator=generator).to(form.dtype)
        q, kv = qkv[:, : KV_HEADS * group], qkv[:, KV_HEADS * group :]
        kv_T2KD = kv.view(rows, 2, KV_HEADS, -1)
        sinks_H = torch.randn(KV_HEADS * group, generator=generator) * 3 if sinks else None
        outs.append(attention.attend(layer, q, kv_T2KD, softcap, sinks_H).clone())
    return outs


@pytest.mark.parametrize(
    ("softcap", "sinks", "heads"),
    [(0.0, False, (3, 24)), (2.0, False, (1, 32)), (0.0, True, (2, 40)), (0.0, False, (7, 8))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_see_what_they_see_in_plain_torch(
    dtype: torch.dtype, softcap: float, sinks: bool, heads: tuple[int, int], threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of heads: how many have a key, and how wide they are."""
    monkeypatch.setattr(row_attention, "ALONE_PRODUCTS", 0)
    group, width = heads
    theirs, ours = make_cache(dtype, width), make_cache(dtype, width)
    ours.device_pages.copy_(theirs.device_pages)
    geometry = Geometry(PAGE_TOKENS, next(iter(theirs.formats.values())).num_bytes)
    expected = attended(EagerAttentions(theirs, geometry), theirs, softcap, sinks, group)
    found = attended(RowAttentions(ours, geometry), ours, softcap, sinks, group)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)
    assert torch.equal(ours.device_pages, theirs.device_pages)


def test_rows_with_several_queries_are_for_plain_torch() -> None:
    cache = make_cache(torch.float32, 8)
    make = RowAttentions(cache, Geometry(PAGE_TOKENS, 1024))
    tables = np.arange(len(cache.layout.spans) * 20).reshape(-1, 2, 10)
    starts = np.array([3, 0])
    for counts, num_decode, kind in (((1, 5), 1, EagerAttention), ((1, 1), 2, RowAttention)):
        assert isinstance(make(starts, np.array(counts), tables, num_decode), kind)


def test_heads_of_no_whole_vectors_are_for_plain_torch() -> None:
    cache = make_cache(torch.float32, 12)
    tables = np.arange(len(cache.layout.spans) * 10).reshape(-1, 1, 10)
    make = RowAttentions(cache, Geometry(PAGE_TOKENS, 1024))
    assert isinstance(make(np.array([3]), np.array([1]), tables, 1), EagerAttention)


def test_a_row_has_the_same_bits_alone() -> None:
    """In whatever part of a page its span begins, beside whatever rows."""
    cache = make_cache(torch.bfloat16, 16)
    make = RowAttentions(cache, Geometry(PAGE_TOKENS, 1024))
    rows, pages = len(POSITIONS), np.arange(len(SPANS) * len(POSITIONS) * 10)
    tables = pages[: len(cache.layout.spans) * rows * 10].reshape(-1, rows, 10)
    qkv = torch.randn(rows, KV_HEADS * 7, 16).bfloat16()

    def outs(some: slice) -> list[Tensor]:
        counts = np.ones(rows, np.int64)[some]
        step = make(POSITIONS[some], counts, tables[:, some], len(counts))
        q, kv = qkv[some, : KV_HEADS * 5], qkv[some, KV_HEADS * 5 :]
        kv = kv.view(len(kv), 2, KV_HEADS, -1)
        return [step.attend(layer, q, kv, 0.0, None).clone() for layer in range(len(SPANS))]

    together = outs(slice(None))
    for row in range(rows):
        for one, all_rows in zip(outs(slice(row, row + 1)), together, strict=True):
            assert torch.equal(one[0], all_rows[row])


def test_a_number_that_is_none_stays_one() -> None:
    """A broken sequence is found by its logits."""
    cache = make_cache(torch.bfloat16, 8)
    cache.device_pages.fill_(255)
    make = RowAttentions(cache, Geometry(PAGE_TOKENS, 1024))
    outs = attended(make, cache, 0.0, False)
    assert outs[0][0].isfinite().all()  # it sees itself alone
    assert outs[0][3].isnan().all()
