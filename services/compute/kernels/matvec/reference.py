"""The same products in plain torch, with the kernels' rounding: also right in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.add_rms_norm.reference import rms_norm
from services.compute.kernels.silu_mul.reference import silu_mul


def matvec(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> None:
    """x W^T + b into `out_TO`, summed in float32 or wider and rounded once."""
    out_TO.copy_(_product(x_TI, weight_OI, bias_O))


def norm_matvec(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    norm_weight_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    sum_TE: Tensor | None,
) -> None:
    """The product of the RMS norm of x + delta; x + delta itself into `sum_TE`."""
    normed_TE = _add_norm(x_TE, delta_TE, norm_weight_E, eps, sum_TE)
    out_TO.copy_(_product(normed_TE, weight_OE, bias_O))


def norm_gate_up_silu(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    norm_weight_E: Tensor,
    eps: float,
    weight_2F_E: Tensor,
    out_TF: Tensor,
    sum_TE: Tensor | None,
) -> None:
    """silu(gate) * up of the RMS norm of x + delta; the gates are the weight's first half."""
    normed_TE = _add_norm(x_TE, delta_TE, norm_weight_E, eps, sum_TE)
    silu_mul(_product(normed_TE, weight_2F_E, None).to(x_TE.dtype), out_TF)


def _add_norm(
    x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float, sum_TE: Tensor | None
) -> Tensor:
    x_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if sum_TE is not None:
        sum_TE.copy_(x_TE)
    return rms_norm(x_TE, weight_E, eps)


def _product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    return F.linear(x_TI.to(wide), weight_OI.to(wide), None if bias_O is None else bias_O.to(wide))
