"""A linear map with its weight as Hugging Face stores it: [out, in]."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Several maps of one input are merged into one by stacking their rows."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map [T, I] to [T, O]."""
        return F.linear(x_TI, self.weight_OI, self.bias_O)
