"""Addition and RMS norm (Zhang and Sennrich, 2019) in plain PyTorch, for any float dtype.

Shape legend: T tokens, S sampled tokens, E hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Mean and division in float32 at least; rounded to x's dtype before the weight is applied."""
    wide_TE = x_TE.to(torch.promote_types(x_TE.dtype, torch.float32))
    mean_T1 = wide_TE.square().mean(-1, keepdim=True)
    return (wide_TE * torch.rsqrt(mean_T1 + eps)).to(x_TE.dtype) * weight_E


def add_rms_norm(
    x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float, out_TE: Tensor
) -> None:
    """x += delta, out = rms_norm(x); without delta x stays as it is."""
    if delta_TE is not None:
        x_TE.add_(delta_TE)
    out_TE.copy_(rms_norm(x_TE, weight_E, eps))


def gather_add_rms_norm(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    index_S: Tensor,
    weight_E: Tensor,
    eps: float,
    out_SE: Tensor,
) -> None:
    """out[s] = rms_norm((x + delta)[index_S[s]]); x stays as it is."""
    x_SE = x_TE[index_S.long()]
    if delta_TE is not None:
        x_SE = x_SE + delta_TE[index_S.long()]
    out_SE.copy_(rms_norm(x_SE, weight_E, eps))
