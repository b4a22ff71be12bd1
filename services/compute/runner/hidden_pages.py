"""What a head keeps of the model's states, one of each position, in pages by the numbers of the
model's own, so that it goes where they go.

Shape legend: T tokens, N slots, L pages of a slot, E width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.span import AttentionSpan
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import copy_pages
from services.compute.step import Int64Array


class PageCounts(NamedTuple):
    """Pages of the device and of the host."""

    device: int
    host: int


class PlaceTable(NamedTuple):
    """The model's, of layers that see the same positions as the head."""

    pages_NL: Int64Array
    page_tokens: int
    span: AttentionSpan

    def of(self, slots_T: Int64Array, positions_T: Int64Array) -> Int64Array:
        return self.pages_NL[slots_T, positions_T // self.page_tokens]


class PagedRows:
    """A memory with something of each page, on the device and on the host; zeros at first."""

    def __init__(self, counts: PageCounts, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.device, self._host = (_zeros((count, *shape), dtype) for count in counts)

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        to_host = direction is Direction.TO_HOST
        source, target = (self.device, self._host) if to_host else (self._host, self.device)
        copy_pages(source, target, pages)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The system hands out their memory as it is touched, where `torch.zeros` touches all."""
    if not (num_bytes := math.prod(shape) * dtype.itemsize):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


class HiddenPages:
    def __init__(
        self, table: PlaceTable, counts: PageCounts, width: int, dtype: torch.dtype
    ) -> None:
        self._table = table
        self._rows = PagedRows(counts, (table.page_tokens, width), dtype)
        self._flat = self._rows.device.view(-1, width)

    def write(self, slots_T: Int64Array, positions_T: Int64Array, x_TE: Tensor) -> None:
        self._flat[self._places(slots_T, positions_T)] = x_TE

    def before(self, slots_T: Int64Array, positions_T: Int64Array) -> Tensor:
        """[T, E] of the positions before these."""
        return self._flat[self._places(slots_T, np.maximum(positions_T - 1, 0))]

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._rows.transfer(direction, pages)

    def _places(self, slots_T: Int64Array, positions_T: Int64Array) -> Tensor:
        pages_T = self._table.of(slots_T, positions_T)
        page_tokens = self._table.page_tokens
        return torch.from_numpy(pages_T * page_tokens + positions_T % page_tokens)
