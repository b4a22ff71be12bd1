"""How a layer's keys and values lie in a page: as they are, or as FP8 (E4M3) or INT8 with scales.

A quantized entry times its scale is the value. There is a scale for each token and kv head, one for
its key and one for its value (of a latent one for it, and one for the rotated part behind it), so
nothing has to be calibrated: the largest magnitude of the head
becomes the largest of an entry. Scales are bfloat16, which has the range of float32, and are
rounded up: entries are made with the rounded one, so that at most a 128th of their range is lost.
What is not finite has a scale of NaN, and spoils whatever reads it as it would have unquantized.

Shape legend: N pages, K kv heads, P positions in a page, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FP8: 448.0, INT8: 127.0}
"""Magnitude of an entry."""

SMALLEST_SCALE = 2.0**-100
"""Its reciprocal is far from infinite; a head of smaller values is one of zeros."""

SCALE = torch.bfloat16
ALIGNMENT = 16  # bytes, of a load by one thread


class LayerPages(NamedTuple):
    """One layer's part of all pages; each page's is contiguous."""

    entries: Tensor  # [N, 2, K, P, D]: keys, then values; of latents [N, 1, 1, P, D]
    scales: Tensor | None = None  # [N, 2, K, P], in memory [N, K, P, 2]; None: entries are values


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Of one layer in one page: entries [2, K, P, D], then scales [K, P, 2] if they have any.

    Those of a token's key and value lie together, so that kernels load both as one word.
    """

    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype  # of keys and values
    entry: torch.dtype  # the same, or one of LARGEST
    latent_dim: int = 0
    """So many of an entry's first columns are a latent, which stands for the values, too: there are
    no others, and one head. 0: keys have values beside them."""

    @property
    def num_parts(self) -> int:
        return 1 if self.latent_dim else 2

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def is_quantized(self) -> bool:
        return self.entry in LARGEST

    @property
    def num_entries(self) -> int:
        return self.num_parts * self.kv_heads * self.page_tokens * self.head_dim

    @property
    def num_scales(self) -> int:
        return 2 * self.kv_heads * self.page_tokens

    @property
    def num_bytes(self) -> int:
        size = self.num_entries * self.entry.itemsize
        if not self.is_quantized:
            return size
        size += self.num_scales * SCALE.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def pages(self, pages: Tensor, first_byte: int) -> LayerPages:
        """The part that begins at this byte of each of these pages, uint8 [N, bytes]."""
        sizes = (self.kv_heads, self.page_tokens)
        last = first_byte + self.num_entries * self.entry.itemsize
        entries = pages[:, first_byte:last].view(self.entry)
        entries = entries.view(len(pages), self.num_parts, *sizes, self.head_dim)
        if not self.is_quantized:
            return LayerPages(entries)
        num_bytes = self.num_scales * SCALE.itemsize
        scales = pages[:, last : last + num_bytes].view(SCALE).view(len(pages), *sizes, 2)
        return LayerPages(entries, scales.permute(0, 3, 1, 2))


def quantize(x: Tensor, entry: torch.dtype) -> tuple[Tensor, Tensor]:
    """Entries [..., D] and scales [...] of heads [..., D]: the reference, and what the CPU does.

    All in float32, each operation with one rounding, so that other devices can do exactly this.
    """
    wide = x.float()
    scales = _scales(wide.abs().amax(dim=-1), LARGEST[entry])
    scaled = wide * (1.0 / scales.float())[..., None]
    if entry == INT8:
        scaled = scaled.round()
    return scaled.to(entry), scales


def _scales(largest_value: Tensor, largest_entry: float) -> Tensor:
    exact = (largest_value * (1.0 / largest_entry)).clamp_min(SMALLEST_SCALE)
    exact = exact.masked_fill(~largest_value.isfinite(), torch.nan)
    return ((exact.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(SCALE)


def quantize_latents(x: Tensor, form: LayerFormat) -> tuple[Tensor, Tensor]:
    """Entries [..., D] and scales [..., 2] of latents with their rotated parts."""
    widths = [form.latent_dim, form.head_dim - form.latent_dim]
    parts = [quantize(part, form.entry) for part in torch.split(x, widths, dim=-1)]
    entries, scales = zip(*parts, strict=True)
    codes = torch.cat([part.view(torch.uint8) for part in entries], dim=-1)
    return codes.view(form.entry), torch.stack(scales, dim=-1)


def dequantize(pages: LayerPages, dtype: torch.dtype, latent_dim: int = 0) -> Tensor:
    """Keys and values [N, 2, K, P, D] of pages, or latents [N, 1, 1, P, D], exact in float64."""
    values = pages.entries.to(dtype)
    if pages.scales is None:
        return values
    scales = pages.scales.to(dtype)[..., None]
    if latent_dim:
        widths = torch.tensor([latent_dim, values.shape[-1] - latent_dim], device=values.device)
        scales = torch.repeat_interleave(scales.transpose(1, 4), widths, dim=4)
    return values * scales
