"""How the CPU writes keys and values of a cache group's layers into pages, and gathers them.

Shape legend: T tokens, N pages, K kv heads, P positions in a page, D head width, B rows of a group
of them, n pages of a row, L = n * P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import (
    FP8,
    LayerFormat,
    quantize,
    quantize_latents,
)
from services.compute.kernels.step.span import AttentionSpan
from services.compute.layers.paged_cache import PagedCache

Int64Array: TypeAlias = npt.NDArray[np.int64]

DECODED_AT_ONCE = 1 << 17
"""Entries, so that the passes over them stay in a core's second-level cache."""


class Gathered(NamedTuple):
    """Keys and values of some rows, [B, K, L, D], and scales [B, K, 1, L] if they have any.

    Of latents the keys' first columns are the values.

    A score is to be multiplied by its key's scale, a probability by its value's.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def up_to(self, num_positions: int) -> Gathered:
        """The first of the positions."""
        keys, values, key_scales, value_scales = self
        return Gathered(
            keys[:, :, :num_positions],
            values[:, :, :num_positions],
            None if key_scales is None else key_scales[..., :num_positions],
            None if value_scales is None else value_scales[..., :num_positions],
        )


class PageLayers(Protocol):
    """All layers of one cache group; what is worked out of page numbers serves each of them."""

    def slots(self, pages_T: Int64Array, offsets_T: Int64Array) -> tuple[Tensor, ...]:
        """Where tokens go, for `write`."""
        ...

    def write(self, number: int, slots: tuple[Tensor, ...], kv_T2KD: Tensor) -> None: ...

    def index(self, pages_Bn: Int64Array) -> Tensor:
        """Where pages lie, for `gather`."""
        ...

    def gather(self, number: int, index: Tensor, num_rows: int) -> Gathered:
        """What is returned is overwritten by the next call."""
        ...


class Workspace:
    """Memory for gathered pages, kept between steps: fresh memory costs more than the copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(0, dtype=dtype)

    def take(self, num_rows: int, width: int) -> Tensor:
        """[num_rows, width], with whatever was there."""
        size = num_rows * width
        if self._buffer.numel() < size:
            self._buffer = self._buffer.new_empty(size)
        return self._buffer[:size].view(num_rows, width)


class PlainLayers:
    """Entries are the values: each head of a page is copied to where it is multiplied."""

    def __init__(self, form: LayerFormat, pages: Tensor, num_layers: int) -> None:
        self._form = form
        self._page_heads = pages.shape[1] // (
            form.page_tokens * form.head_dim * form.dtype.itemsize
        )
        self._workspace = Workspace(form.dtype)
        # Entries and rows of what was gathered last, where it lies, and its views.
        self._size = 0, 0
        self._space = self._workspace.take(0, 0)
        self._gathered = Gathered(self._space, self._space)
        values = pages.view(form.dtype)
        by_head = values.view(-1, form.page_tokens * form.head_dim)
        by_position = values.view(-1, form.head_dim)
        heads = form.num_parts * form.kv_heads
        self._by_head = [by_head[n * heads :] for n in range(num_layers)]
        self._by_position = [by_position[n * heads * form.page_tokens :] for n in range(num_layers)]

    def slots(self, pages_T: Int64Array, offsets_T: Int64Array) -> tuple[Tensor, ...]:
        """Flat positions [T * 2 * K] of each head's key, then of its value, in the first layer;
        of latents [T]."""
        form = self._form
        heads = np.arange(form.num_parts * form.kv_heads) * form.page_tokens
        base = pages_T * (self._page_heads * form.page_tokens) + offsets_T
        return (torch.from_numpy((base[:, None] + heads).reshape(-1)),)

    def write(self, number: int, slots: tuple[Tensor, ...], kv_T2KD: Tensor) -> None:
        values = kv_T2KD.reshape(-1, self._form.head_dim)
        self._by_position[number].index_copy_(0, slots[0], values)

    def index(self, pages_Bn: Int64Array) -> Tensor:
        """Indices of heads of pages in the order [2, B, K, n]."""
        kv_heads = self._form.kv_heads
        kinds = np.arange(self._form.num_parts)[:, None, None, None] * kv_heads
        heads = np.arange(kv_heads)[None, None, :, None]
        index: Int64Array = pages_Bn[None, :, None, :] * self._page_heads + (kinds + heads)
        return torch.from_numpy(index.reshape(-1))

    def gather(self, number: int, index: Tensor, num_rows: int) -> Gathered:
        size = len(index), num_rows
        if size != self._size:  # else the layer before had the same
            form = self._form
            self._space = self._workspace.take(len(index), form.page_tokens * form.head_dim)
            parts = self._space.view(form.num_parts, num_rows, form.kv_heads, -1, form.head_dim)
            gathered = Gathered(parts[0], parts[-1][..., : form.value_dim])
            self._size, self._gathered = size, gathered
        torch.index_select(self._by_head[number], 0, index, out=self._space)
        return self._gathered


class QuantizedLayers:
    """Pages are copied whole, then their entries converted to where they are multiplied."""

    def __init__(self, form: LayerFormat, pages: Tensor, num_layers: int) -> None:
        self._form = form
        layers = [form.pages(pages, n * form.num_bytes) for n in range(num_layers)]
        self._entries = [layer.entries.view(torch.uint8) for layer in layers]
        self._scales = [layer.scales for layer in layers if layer.scales is not None]
        # by page, as they lie there
        self._scale_rows = [scales.permute(0, 2, 3, 1).flatten(1) for scales in self._scales]
        self._copied = Workspace(torch.uint8)
        self._workspace = Workspace(form.dtype)
        self._unit = HALF_UNIT if form.dtype == torch.float16 else 1.0

    def slots(self, pages_T: Int64Array, offsets_T: Int64Array) -> tuple[Tensor, ...]:
        return torch.from_numpy(pages_T), torch.from_numpy(offsets_T)

    def write(self, number: int, slots: tuple[Tensor, ...], kv_T2KD: Tensor) -> None:
        pages, offsets = slots
        entries, scales = quantize(kv_T2KD, self._form.entry)
        self._entries[number][pages, :, :, offsets] = entries.view(torch.uint8)
        self._scales[number][pages, :, :, offsets] = scales

    def index(self, pages_Bn: Int64Array) -> Tensor:
        return torch.from_numpy(pages_Bn.reshape(-1))

    def gather(self, number: int, index: Tensor, num_rows: int) -> Gathered:
        form = self._form
        sizes = (num_rows, -1, 2, form.kv_heads, form.page_tokens)
        copied = self._copied.take(len(index), form.num_entries)
        torch.index_select(self._entries[number].flatten(1), 0, index, out=copied)
        entries = copied.view(form.entry).view(*sizes, form.head_dim).permute(2, 0, 3, 1, 4, 5)
        space = self._workspace.take(len(index), form.num_entries)
        decode(entries, space.view(entries.shape))
        keys, values = space.view(2, num_rows, form.kv_heads, -1, form.head_dim).unbind()
        scales = torch.index_select(self._scale_rows[number], 0, index).float()
        scales.mul_(1.0 / self._unit)
        scales = scales.view(num_rows, -1, form.kv_heads, form.page_tokens, 2).permute(
            4, 0, 2, 1, 3
        )
        key_scales, value_scales = scales.reshape(2, num_rows, form.kv_heads, 1, -1)
        return Gathered(keys, values, key_scales, value_scales)


class QuantizedLatents:
    """Latents are made numbers again where they are gathered: they are keys and values at once, and
    have two scales."""

    def __init__(self, form: LayerFormat, pages: Tensor, num_layers: int) -> None:
        self._form = form
        layers = [form.pages(pages, n * form.num_bytes) for n in range(num_layers)]
        self._entries = [layer.entries.view(torch.uint8)[:, 0, 0] for layer in layers]
        # [N, P, 2], as they lie there
        self._scales = [
            layer.scales.permute(0, 2, 3, 1)[:, 0] for layer in layers if layer.scales is not None
        ]
        self._copied = Workspace(torch.uint8)
        self._decoded = Workspace(torch.float32)
        self._workspace = Workspace(form.dtype)

    def slots(self, pages_T: Int64Array, offsets_T: Int64Array) -> tuple[Tensor, ...]:
        return torch.from_numpy(pages_T), torch.from_numpy(offsets_T)

    def write(self, number: int, slots: tuple[Tensor, ...], kv_T2KD: Tensor) -> None:
        entries, scales = quantize_latents(kv_T2KD[:, 0, 0], self._form)
        self._entries[number][slots] = entries.view(torch.uint8)
        self._scales[number][slots] = scales

    def index(self, pages_Bn: Int64Array) -> Tensor:
        return torch.from_numpy(pages_Bn.reshape(-1))

    def gather(self, number: int, index: Tensor, num_rows: int) -> Gathered:
        form = self._form
        size = (len(index), form.num_entries)
        copied, decoded = self._copied.take(*size), self._decoded.take(*size)
        torch.index_select(self._entries[number].flatten(1), 0, index, out=copied)
        decode(copied.view(form.entry), decoded)
        scales = torch.index_select(self._scales[number], 0, index).float()
        by_token = decoded.view(-1, form.head_dim)
        for part, column in zip(
            (by_token[:, : form.latent_dim], by_token[:, form.latent_dim :]),
            scales.view(-1, 2, 1).unbind(1),
            strict=True,
        ):
            part.mul_(column)
        keys = self._workspace.take(*size).copy_(decoded)
        keys = keys.view(num_rows, 1, -1, form.head_dim)
        return Gathered(keys, keys[..., : form.latent_dim])


HALF_UNIT = 2.0**-8
"""As float16 entries are so much smaller: it cannot hold a sum of products of whole ones."""

AS_BITS = {  # bits of a dtype, where FP8's exponent and mantissa go, what it then lacks
    torch.float32: (torch.int32, 20, 2.0**120),
    torch.bfloat16: (torch.int16, 4, 2.0**120),
    torch.float16: (torch.int16, 7, 1.0),
}


def decode(entries: Tensor, out: Tensor) -> None:
    """Write entries as numbers, exactly; as float16 in HALF_UNIT. `out` is contiguous.

    Torch 2.13 converts FP8 one by one, 3.5 ns each on a Xeon; by its bits it takes 0.4, INT8 0.15.
    """
    if entries.dtype != FP8:
        out.copy_(entries)
        if out.dtype == torch.float16:
            out.mul_(HALF_UNIT)
        return
    # Exponent and mantissa come to the ends of the wider ones, as a number that is too small;
    # widened as signed bytes, so that the sign is there already.
    bits, shift, factor = AS_BITS[out.dtype]
    mask = (0x7F << shift) - (1 << (8 * bits.itemsize - 1))
    wide = out.view(bits)
    wide.copy_(entries.view(torch.int8))
    numbers = torch.split(out.view(-1), DECODED_AT_ONCE)
    for part, number in zip(torch.split(wide.view(-1), DECODED_AT_ONCE), numbers, strict=True):
        part.bitwise_left_shift_(shift).bitwise_and_(mask)
        if factor != 1.0:
            number.mul_(factor)


_KINDS: Mapping[tuple[bool, bool], Callable[[LayerFormat, Tensor, int], PageLayers]] = {
    (False, False): PlainLayers,
    (False, True): PlainLayers,
    (True, False): QuantizedLayers,
    (True, True): QuantizedLatents,
}
"""By whether entries are quantized, and whether they are latents."""


def layers_of(cache: PagedCache) -> tuple[PageLayers, ...]:
    """The layers of a cache's groups."""

    def of_span(span: AttentionSpan) -> PageLayers:
        form, count = cache.formats[span], cache.layout.layers_per_group[span]
        return _KINDS[form.is_quantized, form.latent_dim > 0](form, cache.device_pages, count)

    by_span = {span: of_span(span) for span in cache.formats}
    return tuple(by_span[span] for span in cache.layout.spans)
