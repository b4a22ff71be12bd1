"""Latent attention on the CPU: all heads' queries against one head of latents, in plain torch.

Shape legend: T tokens, H query heads, C columns of what the input makes, W = R + P the width of an
entry, R of its latent, P of its rotated part, N what does not rotate of a head, V of its value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.layers.parts import LatentAttention
from services.compute.layers.rope import rotate
from services.compute.layers.step_attention import StepAttention
from services.compute.layers.weighted_layers import LinearMap
from services.compute.layers.widened import bmm


def attend_latent(
    down_TC: Tensor,
    attention: LatentAttention[LinearMap],
    over: StepAttention,
    rope_rows: tuple[Tensor, Tensor],
) -> Tensor:
    """Store the step's latents and return [T, H * V]; rows of the rotation are those of all heads'
    queries, then of the key."""
    heads, width = attention.num_heads, attention.entry_dim
    num_tokens, rank = len(down_TC), attention.latent_dim
    q_TQ, entry_TW = torch.split(down_TC, [down_TC.shape[1] - width, width], dim=1)
    if attention.query_up is not None:
        if attention.query_norm is not None:
            q_TQ = attention.query_norm(q_TQ)
        q_TQ = attention.query_up(q_TQ)
    q_THD = q_TQ.view(num_tokens, heads, -1)
    num_still = attention.key_up_HNR.shape[1]
    # queries [T, H, W], and behind them the entries
    all_TXW = down_TC.new_empty(num_tokens, heads + 1, width)
    q_HTR = all_TXW[:, :heads, :rank].transpose(0, 1)
    q_HTR.copy_(bmm(q_THD[:, :, :num_still].transpose(0, 1), attention.key_up_HNR))
    all_TXW[:, :heads, rank:] = q_THD[:, :, num_still:]
    all_TXW[:, heads, :rank] = attention.latent_norm(entry_TW[:, :rank])
    all_TXW[:, heads, rank:] = entry_TW[:, rank:]
    rotate(all_TXW[:, :, rank:], rope_rows)
    q_THW, entries_T11W = all_TXW[:, :heads].mul_(attention.scale), all_TXW[:, heads:, None]
    mixed_TC = over.attend(attention.layer, q_THW, entries_T11W, 0.0)
    mixed_HTR = mixed_TC.view(num_tokens, heads, rank).transpose(0, 1)
    out_HTV = bmm(mixed_HTR, attention.value_up_HVR.transpose(1, 2))
    return out_HTV.transpose(0, 1).flatten(1)
