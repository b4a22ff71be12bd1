"""Makes latent attention of tensors that are named as DeepSeek's.

Shape legend: H query heads, N width of what does not rotate of a head, V of its value, R of the
latent, X of a head's key and value, C columns of what the input makes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from common.latent_shape import LatentShape
from services.compute.layers.parts import LatentAttention
from services.compute.layers.rope import RopeSpec
from services.compute.models.builder import Builder, NormForm

L = TypeVar("L")

NORM = NormForm(1e-6)
"""Of latents, whatever config.json says of the others: transformers and DeepSeek's own code read
none for them."""


def latent_attention(
    make: Builder[Any], at: str, latent: LatentShape, rope: RopeSpec, scale: float
) -> LatentAttention[Any]:
    """The next layer's mixer, of tensors whose names begin with `at`."""
    shape, mine = make.shape, make.heads.queries
    num_rows = shape.num_heads * latent.query_dim
    queries = _turned_last(torch.arange(num_rows), latent.query_dim, rope)
    queries = queries[mine.start * latent.query_dim : mine.stop * latent.query_dim]
    if latent.query_rank:
        names, num_down = ["q_a_proj", "kv_a_proj_with_mqa"], latent.query_rank
        down_order = torch.arange(num_down)
        query_norm = make.norm(f"{at}.q_a_layernorm", NORM, latent.query_rank)
        query_up = make.linear([f"{at}.q_b_proj"], [num_rows], latent.query_rank, False, queries)
    else:
        names, num_down = ["q_proj", "kv_a_proj_with_mqa"], num_rows
        down_order, query_norm, query_up = queries, None, None
    entry = _turned_last(torch.arange(latent.entry_dim), latent.entry_dim, rope)
    down = make.linear(
        [f"{at}.{name}" for name in names],
        [num_down, latent.entry_dim],
        shape.hidden_size,
        False,
        torch.cat((down_order, num_down + entry)),
    )
    up_HXR = _expansion(make, at, latent)[mine.start : mine.stop]
    mixer = LatentAttention(
        layer=make.mixer_number,
        num_heads=len(mine),
        down=down,
        out=make.out(f"{at}.o_proj", width=latent.value_dim),
        latent_norm=make.norm(f"{at}.kv_a_layernorm", NORM, latent.latent_dim),
        up_HXR=up_HXR.clone(memory_format=torch.contiguous_format),
        still_dim=latent.nope_dim,
        scale=scale,
        rope=rope,
        query_norm=query_norm,
        query_up=query_up,
    )
    make.add_mixer(mixer)
    return mixer


def _expansion(make: Builder[Any], at: str, latent: LatentShape) -> Tensor:
    """What makes a head's key, then its value, of the latent: one module, or two in GGUF files,
    which have that of keys as queries are multiplied by it."""
    heads, rank = make.shape.num_heads, latent.latent_dim
    if not make.has(f"{at}.kv_b_proj"):
        key_up_HRN = make.plain(f"{at}.k_b_proj", heads * rank, latent.nope_dim).view(
            heads, rank, -1
        )
        value_up = make.plain(f"{at}.v_b_proj", heads * latent.value_dim, rank)
        return torch.cat((key_up_HRN.transpose(1, 2), value_up.view(heads, -1, rank)), dim=1)
    num_up = heads * (latent.nope_dim + latent.value_dim)
    return make.plain(f"{at}.kv_b_proj", num_up, rank).view(heads, -1, rank)


def _turned_last(rows: Tensor, width: int, rope: RopeSpec) -> Tensor:
    """Numbers of rows, of which the last columns of each so many are in the order in which they
    rotate."""
    heads = rows.view(-1, width).clone()
    heads[:, -rope.head_dim :] = heads[:, -rope.head_dim :][:, rope.row_order()]
    return heads.flatten()
