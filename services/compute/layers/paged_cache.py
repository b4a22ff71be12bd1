"""Keys and values of all sequences in pages on the device, and pages on the host to swap to.

Which page belongs to whom is not known here.

Shape legend: K kv heads, L positions of a sequence, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import LayerFormat, LayerPages
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kv.transfer import Direction, PagePairs


class Place(NamedTuple):
    """Where a layer's keys and values lie: in the pages of its group, at a number in each."""

    group: int
    number: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's layers share pages: in groups, so that all pages are of one size.

    The layers of a group see the same positions, and so share a page table. Groups of one span
    have as many layers each; those of layers that take fewer bytes have more.
    """

    page_bytes: int
    spans: tuple[AttentionSpan, ...]  # of each group
    places: tuple[Place, ...]  # of each layer
    layers_per_group: Mapping[AttentionSpan, int]

    @staticmethod
    def of(
        spans: Sequence[AttentionSpan], layer_bytes: Mapping[AttentionSpan, int] | None = None
    ) -> CacheLayout:
        """The layout of layers that see these spans, and take so many bytes each.

        Their number in a group is a choice between places that stay empty (the last group of a kind
        is filled up) and tables to keep. A place in a group that sees everything counts four times:
        it has as many positions as the text. Gemma 3 27B, with 10 layers that see everything and 52
        that do not, gets six groups of 11, Gemma 3 4B, with 5 and 29, seven of 5.
        """
        kinds = {span: list(spans).count(span) for span in dict.fromkeys(spans)}
        layer_bytes = layer_bytes or dict.fromkeys(kinds, 1)
        widest = max(layer_bytes[span] for span in kinds)

        def fitting(size: int, span: AttentionSpan) -> int:
            return size * widest // layer_bytes[span]

        def cost(size: int) -> tuple[int, int]:
            num_groups = {s: -(-count // fitting(size, s)) for s, count in kinds.items()}
            total = sum(num_groups.values())
            return size * (total + 3 * num_groups.get(FULL, 0)) + total, -size

        size = min(range(1, max(kinds.values()) + 1), key=cost)
        per_group = {span: fitting(size, span) for span in kinds}
        groups: list[AttentionSpan] = []
        at: dict[AttentionSpan, Place] = {}  # the last place taken by each kind
        places = []
        for span in spans:
            last = at.get(span)
            if last is None or last.number + 1 == per_group[span]:
                at[span] = Place(len(groups), 0)
                groups.append(span)
            else:
                at[span] = Place(last.group, last.number + 1)
            places.append(at[span])
        return CacheLayout(size * widest, tuple(groups), tuple(places), per_group)

    def of_layers(self, spans: Sequence[AttentionSpan]) -> CacheLayout:
        """The same pages for other layers, of each span at most as many."""
        free = {
            span: iter([place for place in self.places if self.spans[place.group] == span])
            for span in set(spans)
        }
        return replace(self, places=tuple(next(free[span]) for span in spans))


class PagedCache:
    """Pages of bytes: of each layer of a group what its format says, one behind the other.

    A page is one piece, for swap and transfer. In a layer it is head-major, because attention is
    then two batched matrix products over [K, L, D]: in bf16 and with one query a head, gathering
    and these take less than half the time that the CPU flash kernel of torch 2.13 takes without
    gathering (benchmarks/results/cpu_kernels.md).
    """

    def __init__(
        self,
        layout: CacheLayout,
        formats: Mapping[AttentionSpan, LayerFormat],
        num_pages: tuple[int, int],
        device: torch.device,
    ) -> None:
        """`formats` are those of layers by their span; `num_pages` of the device, the host."""
        self.layout = layout
        self.formats = formats
        num_device_pages, num_host_pages = num_pages
        # empty, not zeros: the system hands out zero pages as they are touched, so that a large
        # cache costs memory only as it fills
        page = (layout.page_bytes,)
        self.device_pages = torch.empty((num_device_pages, *page), dtype=torch.uint8, device=device)
        # A copy from or to memory that is not pinned waits for the device.
        self.host_pages = torch.empty(
            (num_host_pages, *page),
            dtype=torch.uint8,
            pin_memory=device.type == "cuda" and num_host_pages > 0,
        )

    def layer_pages(self, layer: int) -> LayerPages:
        """One layer's part of all device pages."""
        group, number = self.layout.places[layer]
        form = self.formats[self.layout.spans[group]]
        return form.pages(self.device_pages, number * form.num_bytes)

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
