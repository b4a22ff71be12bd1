"""A linear map in plain PyTorch, for any float dtype.

Shape legend: T tokens, I columns in, O columns out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> None:
    """out = x W^T + b in float32 at least, rounded once to out's dtype."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    product_TO = x_TI.to(wide) @ weight_OI.to(wide).T
    out_TO.copy_(product_TO if bias_O is None else product_TO + bias_O.to(wide))
