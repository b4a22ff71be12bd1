"""How layers share pages, and that pages come back as they went."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import CacheLayout, PagedCache, copy_pages
from services.compute.step import int32_array

CPU = torch.device("cpu")


def repeated(pattern: list[int], num_layers: int) -> list[int]:
    """The windows of layers that follow a pattern to the last one."""
    return (pattern * num_layers)[:num_layers]


GEMMA3 = [1024] * 5 + [0]
MODELS = {  # windows of layers; groups by window, and layers in each
    "llama 3 8b": ([0] * 32, {0: 1}, 32),
    "mistral 7b": ([4096] * 32, {4096: 1}, 32),
    "one layer of 32 without a window": ([4096] * 31 + [0], {4096: 8, 0: 1}, 4),
    "gemma 2 2b": (repeated([4096, 0], 26), {4096: 1, 0: 1}, 13),
    "gemma 3 4b": (repeated(GEMMA3, 34), {1024: 6, 0: 1}, 5),
    "gemma 3 27b": (repeated(GEMMA3, 62), {1024: 5, 0: 1}, 11),
    "qwen2 with windows from layer 21": ([0] * 21 + [4096] * 7, {0: 3, 4096: 1}, 7),
}


def check(windows: list[int], layout: CacheLayout) -> None:
    """No layer is lost or doubled, and each is in a group of its window."""
    assert len(layout.places) == len(set(layout.places)) == len(windows)
    for window, place in zip(windows, layout.places, strict=True):
        assert layout.windows[place.group] == window
        assert 0 <= place.number < layout.layers_per_group
    used = Counter(place.group for place in layout.places)
    assert set(used) == set(range(len(layout.windows)))
    for window, count in Counter(windows).items():  # only the last group of a kind has room left
        groups = [used[g] for g, other in enumerate(layout.windows) if other == window]
        assert len(groups) == -(-count // layout.layers_per_group)
        assert set(groups[:-1]) <= {layout.layers_per_group}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_one_window_share_pages_of_one_size(name: str) -> None:
    windows, groups, size = MODELS[name]
    layout = CacheLayout.of(windows)
    check(windows, layout)
    assert Counter(layout.windows) == groups
    assert layout.layers_per_group == size


@example([0] * 6 + [512, 4096])
@example([0] * 13 + [512] + [4096] * 9)
@given(st.lists(st.sampled_from([0, 0, 512, 4096]), min_size=1, max_size=80))
def test_any_windows_have_a_layout_that_costs_no_more_than_a_table_for_each_layer(
    windows: list[int],
) -> None:
    layout = CacheLayout.of(windows)
    check(windows, layout)
    groups = len(layout.windows)
    places = layout.layers_per_group * (groups + 3 * layout.windows.count(0))
    assert places + groups <= len(windows) + 3 * windows.count(0) + len(windows)


def test_layers_of_a_group_keep_their_order() -> None:
    layout = CacheLayout.of(repeated(GEMMA3, 34))
    for group in range(len(layout.windows)):
        numbers = [place.number for place in layout.places if place.group == group]
        assert numbers == list(range(len(numbers)))


def filled(layout: CacheLayout, num_pages: int, num_host_pages: int = 0) -> PagedCache:
    torch.manual_seed(0)
    cache = PagedCache(layout, (2, 4, 8), (num_pages, num_host_pages), torch.float32, CPU)
    cache.device_pages.copy_(torch.randn(cache.device_pages.shape))
    return cache


def test_a_page_is_one_piece_of_memory_with_all_layers_of_its_group() -> None:
    layout = CacheLayout.of([0, 8, 8, 0, 8])
    cache = filled(layout, 5)
    assert cache.device_pages.shape == (5, layout.layers_per_group, 2, 2, 4, 8)
    assert cache.device_pages.is_contiguous()
    assert cache.page_heads * 4 * 8 == cache.device_pages[0].numel()


def test_what_is_written_is_in_the_view_of_its_layer_alone_and_is_gathered_from_there() -> None:
    layout = CacheLayout.of([0, 8, 0])
    cache = filled(layout, 5)
    for layer, place in enumerate(layout.places):
        before = cache.device_pages.clone()
        page, head, offset, rows = 3, 1, 2, torch.randn(2, 8)
        key = (page * cache.page_heads + head) * 4 + offset
        value = (page * cache.page_heads + 2 + head) * 4 + offset
        cache.write(layer, torch.tensor([key, value]), rows)
        before[page, place.number, :, head, offset] = rows
        assert torch.equal(cache.device_pages, before)
        view = cache.layer_pages(layer)
        assert view.shape == (5, 2, 2, 4, 8)
        assert torch.equal(view[page, :, head, offset], rows)
        out = torch.empty(2, 4 * 8)
        index = torch.tensor([page * cache.page_heads + head, 4 * cache.page_heads + 2])
        cache.gather(layer, index, out)
        assert torch.equal(out.view(2, 4, 8), torch.stack((view[page, 0, head], view[4, 1, 0])))


def test_a_page_is_cleared_in_all_layers() -> None:
    cache = filled(CacheLayout.of([0, 0]), 4)
    before = cache.device_pages.clone()
    cache.clear([1, 3])
    before[[1, 3]] = 0.0
    assert torch.equal(cache.device_pages, before)


def test_pages_come_back_from_the_host_as_they_went() -> None:
    cache = filled(CacheLayout.of([0] * 3), 4, 2)
    before = cache.device_pages.clone()
    copy_pages(*cache.sides(Direction.TO_HOST), PagePairs(int32_array([1, 3]), int32_array([0, 1])))
    cache.device_pages[[1, 3]] = 0.0
    back = PagePairs(int32_array([0, 1]), int32_array([2, 0]))
    copy_pages(*cache.sides(Direction.TO_DEVICE), back)
    assert torch.equal(cache.device_pages[2], before[1])
    assert torch.equal(cache.device_pages[0], before[3])
