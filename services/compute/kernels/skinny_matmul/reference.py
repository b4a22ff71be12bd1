"""The same products in plain torch, with the kernels' rounding: also right in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.silu_mul.reference import silu_mul


def skinny_matmul(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> None:
    """x W^T + b into `out_TO`, summed in float32 or wider and rounded once."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    bias_O = None if bias_O is None else bias_O.to(wide)
    out_TO.copy_(F.linear(x_TI.to(wide), weight_OI.to(wide), bias_O))


def skinny_gate_up_silu(x_TI: Tensor, weight_2F_I: Tensor, out_TF: Tensor) -> None:
    """silu(gate) * up; the gates are the weight's first half."""
    both = torch.empty(x_TI.shape[0], weight_2F_I.shape[0], dtype=x_TI.dtype, device=x_TI.device)
    skinny_matmul(x_TI, weight_2F_I, None, both)
    silu_mul(both, out_TF)
