"""Keys and values of all sequences in pages on the device, and pages on the host to swap to.

Which page belongs to whom is not known here.

Shape legend: N pages, Y layers of a cache group, K kv heads, P positions in a page, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kv.transfer import Direction, PagePairs


class Place(NamedTuple):
    """Where a layer's keys and values lie: in the pages of its group, at a number in each."""

    group: int
    number: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's layers share pages: groups of equally many, so that all pages are of one size.

    The layers of a group see the same positions, and so share a page table.
    """

    layers_per_group: int
    windows: tuple[int, ...]  # of each group; 0: every position
    places: tuple[Place, ...]  # of each layer

    @staticmethod
    def of(windows: Sequence[int]) -> CacheLayout:
        """The layout of layers with these windows.

        Their number in a group is a choice between places that stay empty (the last group of a kind
        is filled up) and tables to keep. A place in a group that sees everything counts four times:
        it has as many positions as the text. Gemma 3 27B, with 10 layers that see everything and 52
        that do not, gets six groups of 11, Gemma 3 4B, with 5 and 29, seven of 5.
        """
        kinds = {window: list(windows).count(window) for window in dict.fromkeys(windows)}

        def cost(size: int) -> tuple[int, int]:
            num_groups = {window: -(-count // size) for window, count in kinds.items()}
            total = sum(num_groups.values())
            return size * (total + 3 * num_groups.get(0, 0)) + total, -size

        size = min(range(1, max(kinds.values()) + 1), key=cost)
        groups: list[int] = []
        at: dict[int, Place] = {}  # the last place taken by each kind
        places = []
        for window in windows:
            last = at.get(window)
            if last is None or last.number + 1 == size:
                at[window] = Place(len(groups), 0)
                groups.append(window)
            else:
                at[window] = Place(last.group, last.number + 1)
            places.append(at[window])
        return CacheLayout(size, tuple(groups), tuple(places))


class PagedCache:
    """Pages of [Y, 2, K, P, D]: of each layer keys, then values, every head's positions together.

    A page is one piece, for swap and transfer. In a layer it is head-major, because attention is
    then two batched matrix products over [K, L, D]: in bf16 and with one query a head, gathering
    and these take less than half the time that the CPU flash kernel of torch 2.13 takes without
    gathering (benchmarks/results/cpu_kernels.md).
    """

    def __init__(
        self,
        layout: CacheLayout,
        shape: tuple[int, int, int],
        num_pages: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shape` is (kv heads, page tokens, head width); `num_pages` of the device, the host."""
        self.layout = layout
        self.kv_heads, self.page_tokens, self.head_dim = shape
        self.num_pages, num_host_pages = num_pages
        page = (layout.layers_per_group, 2, *shape)
        # empty, not zeros: the system hands out zero pages as they are touched, so that a large
        # cache costs memory only as it fills
        self.device_pages = torch.empty((self.num_pages, *page), dtype=dtype, device=device)
        # A copy from or to memory that is not pinned waits for the device.
        self.host_pages = torch.empty(
            (num_host_pages, *page),
            dtype=dtype,
            pin_memory=device.type == "cuda" and num_host_pages > 0,
        )
        layer_heads = 2 * self.kv_heads
        by_head = self.device_pages.view(-1, self.page_tokens * self.head_dim)
        by_position = self.device_pages.view(-1, self.head_dim)
        numbers = range(layout.layers_per_group)
        self._by_head = [by_head[n * layer_heads :] for n in numbers]
        self._by_position = [by_position[n * layer_heads * self.page_tokens :] for n in numbers]

    @property
    def page_heads(self) -> int:
        """Heads of keys and of values in a page, of all its layers."""
        return self.layout.layers_per_group * 2 * self.kv_heads

    def layer_pages(self, layer: int) -> Tensor:
        """One layer's part of all pages, [N, 2, K, P, D]."""
        return self.device_pages[:, self.layout.places[layer].number]

    def write(self, layer: int, index: Tensor, rows: Tensor) -> None:
        """Store rows [n, D] at (page * page_heads + is_value * K + head) * P + offset.

        So they would be counted in the first layer of the pages, whichever layer it is.
        """
        self._by_position[self.layout.places[layer].number].index_copy_(0, index, rows)

    def gather(self, layer: int, index: Tensor, out: Tensor) -> None:
        """Copy heads of pages, page * page_heads + is_value * K + head, into out [n, P * D]."""
        number = self.layout.places[layer].number
        torch.index_select(self._by_head[number], 0, index, out=out)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that are about to be filled in part, so that no stale value is ever read.

        A masked score does not help: the NaN that a broken sequence left behind, times a
        probability of zero, is NaN.
        """
        for page in pages:  # one index_fill_ over all took 80 times as long
            self.device_pages[page].zero_()

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor]:
        """Where a transfer reads and where it writes."""
        if direction is Direction.TO_HOST:
            return self.device_pages, self.host_pages
        return self.host_pages, self.device_pages


def copy_pages(source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """Copy pages between memories of the same shape, in a loop over runs of them."""
    columns = (column.tolist() for column in pages.runs())
    for first, to, length in zip(*columns, strict=True):
        target[to : to + length].copy_(source[first : first + length], non_blocking=True)
