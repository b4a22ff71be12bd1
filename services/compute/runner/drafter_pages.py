"""What drafters keep beside keys and values, in pages by the numbers of the model's own, so that it
goes where they go: how much they have read of each, and the model's states, one of each position.

Shape legend: T tokens, P parts of texts, N slots, L pages of a slot, Y pages, E width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.step.span import AttentionSpan
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import copy_pages
from services.compute.step import Int64Array

READ_AT_ONCE = 512  # tokens of a sequence, whose last ones it drafts behind


class PageCounts(NamedTuple):
    """Pages of the device and of the host."""

    device: int
    host: int


class PlaceTable(NamedTuple):
    """The model's page table that all layers of a drafter have, and what these see."""

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


class ReadPages:
    """How much a drafter has read of each page, whoever's that is: who comes by a page in which
    nobody has drafted, or which lacks the last draft that was right, reads it then."""

    def __init__(self, table: PlaceTable, counts: PageCounts, num_first: int = 0) -> None:
        """Of so many first tokens of a text there is nothing to read."""
        self._table, self._num_first = table, num_first
        self._rows = PagedRows(counts, (), torch.int64)
        self._num_read_Y = self._rows.device.numpy()

    def begin(self, slots_T: Int64Array, positions_T: Int64Array) -> Int64Array:
        """Pages whose first position the model writes begin anew; returns which these are."""
        first_T = positions_T[begins := positions_T % self._table.page_tokens == 0]
        pages_T = self._table.of(slots_T[begins], first_T)
        self._num_read_Y[pages_T] = np.clip(self._num_first - first_T, 0, self._table.page_tokens)
        return pages_T

    def first_unread(
        self, slots_P: Int64Array, positions_P: Int64Array, ends_P: Int64Array
    ) -> Int64Array:
        """The first positions that nobody has read, of those before these ends that tokens at these
        positions see, or that are behind them."""
        pages_NL, page_tokens, span = self._table
        seen_P = span.first_position(positions_P)
        begins_L = np.arange(0, int(ends_P.max(initial=1)), page_tokens)
        num_read_PL = self._num_read_Y[pages_NL[slots_P, : len(begins_L)]]
        # What left a window has no page any more.
        lacks_PL = (num_read_PL < page_tokens) & (begins_L + page_tokens > seen_P[:, None])
        page_P = np.argmax(lacks_PL, axis=1)
        first_P = begins_L[page_P] + num_read_PL[np.arange(len(page_P)), page_P]
        return np.where(lacks_PL.any(axis=1), np.clip(first_P, seen_P, ends_P), ends_P)

    def note(self, slots: Iterable[int], starts: Iterable[int], ends: Iterable[int]) -> None:
        """These positions have been read, as all before them."""
        page_tokens = self._table.page_tokens
        for slot, start, end in zip(slots, starts, ends, strict=True):
            pages = np.arange(start // page_tokens, -(-end // page_tokens))
            num_read = np.minimum(end - pages * page_tokens, page_tokens)
            self._num_read_Y[self._table.pages_NL[slot, pages]] = num_read

    def take(
        self, slots_P: Int64Array, positions_P: Int64Array, ends_P: Int64Array | None = None
    ) -> tuple[Int64Array, ...]:
        """Slots, positions and lengths of what is read next of what `first_unread` is about, as
        much as is read at once; it counts as read from here on. Without ends: of what cannot be
        read at once with the tokens at these positions."""
        ends_P = positions_P - READ_AT_ONCE if ends_P is None else ends_P
        start_P = self.first_unread(slots_P, positions_P, ends_P)
        lacks = start_P < ends_P
        slots_P, start_P, ends_P = slots_P[lacks], start_P[lacks], ends_P[lacks]
        len_P = np.minimum(ends_P - start_P, READ_AT_ONCE)
        self.note(slots_P, start_P, start_P + len_P)
        return slots_P, start_P, len_P

    def take_last(self, slots_P: Int64Array, positions_P: Int64Array, ahead: int = 0) -> Int64Array:
        """Where to begin to read up to these positions, and so many more, which do not count."""
        start_P = self.first_unread(slots_P, positions_P, positions_P + 1)
        start_P = np.minimum(start_P, positions_P + ahead)
        self.note(slots_P, start_P, positions_P + 1)
        return start_P

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._rows.transfer(direction, pages)


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
