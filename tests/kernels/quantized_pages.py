"""Pages of a quantized KV cache for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import (
    FP8,
    INT8,
    LayerFormat,
    LayerPages,
    quantize,
    quantize_latents,
)

ENTRIES = (FP8, INT8)
NUM_LAYERS = 3  # of a page


def layer_of(pages: Tensor, entry: torch.dtype | None, latent_dim: int = 0) -> LayerPages:
    """The middle one of the layers of pages: what [N, 2, K, P, D] or, with a latent_dim, [N, 1, 1,
    P, D] becomes there, in its dtype or quantized; the layers beside it are not numbers, nor are
    entries of what is none."""
    num_pages, _, *sizes = pages.shape
    form = LayerFormat(*sizes, pages.dtype, entry or pages.dtype, latent_dim)
    size = (num_pages, NUM_LAYERS * form.num_bytes)
    raw = torch.full(size, 255, dtype=torch.uint8, device=pages.device)
    layer = form.pages(raw, form.num_bytes)
    if layer.scales is None:
        layer.entries.copy_(pages)
        return layer
    if latent_dim:
        entries, scales = quantize_latents(pages, form)
        scales = scales[:, 0].permute(0, 3, 1, 2)
    else:
        entries, scales = quantize(pages, form.entry)
    codes = entries.view(torch.uint8).masked_fill(pages.isnan(), 255)
    layer.entries.view(torch.uint8).copy_(codes)
    layer.scales.copy_(scales)
    return layer
