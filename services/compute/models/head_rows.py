"""Which rows of the map of queries, keys and values a rank takes, and in which order.

Shape legend: H query heads, K kv heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.distributed.shard import HeadPart
from services.compute.layers.rope import RopeSpec


def qkv_rows(
    shape: DecoderShape, part: HeadPart, rope: RopeSpec | None, by_kv_head: bool
) -> Tensor:
    """Queries, then keys, then values of these heads, in the order in which kernels rotate.

    `by_kv_head`: a checkpoint has the queries of each kv head, then its key, then its value.
    """
    width, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * width)
    if by_kv_head:
        rows = _ungrouped(rows.view(num_kv_heads, -1, width))
    if rope is not None and not rope.is_plain:
        num_rotated = (num_heads + num_kv_heads) * width
        rows = torch.cat((rope.in_order(rows[:num_rotated]), rows[num_rotated:]))
    kv = num_heads + torch.tensor(part.kv)
    heads = torch.cat((torch.tensor(part.queries), kv, num_kv_heads + kv))
    return rows.view(-1, width)[heads].flatten()


def _ungrouped(rows_KXD: Tensor) -> Tensor:
    """All queries' numbers of rows, then all keys', then all values'."""
    q, k, v = rows_KXD[:, :-2], rows_KXD[:, -2], rows_KXD[:, -1]
    return torch.cat((q.flatten(), k.flatten(), v.flatten()))
