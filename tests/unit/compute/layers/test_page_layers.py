"""What is written into pages is gathered from there, by layer, head and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.kernels.kv.kv_format import FP8, INT8, LARGEST, LayerFormat, dequantize
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.page_layers import decode, layers_of
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from tests.spans import spans_of

CPU = torch.device("cpu")
KV_HEADS, PAGE_TOKENS, WIDTH = 2, 4, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_cache(dtype: torch.dtype, entry: torch.dtype | None) -> PagedCache:
    """Three layers, one of them with a window and never quantized."""
    formats = {
        span: LayerFormat(KV_HEADS, PAGE_TOKENS, WIDTH, dtype, kind or dtype)
        for span, kind in ((FULL, entry), (AttentionSpan.window(8), None))
    }
    sizes = {span: form.num_bytes for span, form in formats.items()}
    cache = PagedCache(CacheLayout.of(spans_of([0, 8, 0]), sizes), formats, (8, 0), CPU)
    cache.device_pages.zero_()
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [None, FP8, INT8])
def test_what_is_written_is_in_the_pages_of_its_layer_alone_and_is_gathered_from_there(
    dtype: torch.dtype, entry: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    cache = make_cache(dtype, entry)
    groups = layers_of(cache)
    offsets = np.array([2, 3, 0])
    places = cache.layout.places
    for layer, place in enumerate(places):
        pages = np.array([3, 3, 0]) + 4 * place.group
        own = slice(4 * place.group, 4 * place.group + 4)  # a page is of one group
        of_group = [n for n, other in enumerate(places) if other.group == place.group]
        before = {n: dequantize(cache.layer_pages(n), torch.float64) for n in of_group}
        layers = groups[place.group]
        kv_T2KD = torch.randn(3, 2, KV_HEADS, WIDTH).to(dtype)
        layers.write(place.number, layers.slots(pages, offsets), kv_T2KD)
        after = {n: dequantize(cache.layer_pages(n), torch.float64) for n in of_group}
        expected = kv_T2KD.double()
        found = after[layer][pages, :, :, offsets]
        assert (found - expected).abs().max() < (0.2 if cache.formats[FULL].is_quantized else 1e-9)
        after[layer][pages, :, :, offsets] = 0.0
        before[layer][pages, :, :, offsets] = 0.0
        assert all(torch.equal(before[n][own], after[n][own]) for n in of_group)

    for layer, place in enumerate(cache.layout.places):
        some = np.array([[3, 1], [0, 3]]) + 4 * place.group
        layers = groups[place.group]
        gathered = layers.gather(place.number, layers.index(some), 2)
        values = dequantize(cache.layer_pages(layer), torch.float64)
        by_row = values[some].permute(2, 0, 3, 1, 4, 5).reshape(2, 2, KV_HEADS, -1, WIDTH)
        for kind, found in enumerate((gathered.keys, gathered.values)):
            scales = (gathered.key_scales, gathered.value_scales)[kind]
            exact = found.double()
            if scales is not None:
                exact = exact * scales.double().view(2, KV_HEADS, -1, 1)
            assert torch.equal(exact, by_row[kind])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", LARGEST)
def test_every_entry_becomes_the_number_that_it_is(entry: torch.dtype, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(entry)
    every = every[every.float().isfinite()].repeat(1000)  # more than are decoded at once
    out = torch.empty(every.shape, dtype=dtype)
    decode(every, out)
    unit = 256 if dtype == torch.float16 else 1
    assert torch.equal(out.double() * unit, every.double())
