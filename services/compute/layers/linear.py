"""A linear map with its weight as Hugging Face stores it: [out, in]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class LinearMap(Protocol):
    """y = x W^T + b for x [T, I]."""

    def __call__(self, x_TI: Tensor, /) -> Tensor: ...


class MakeLinear(Protocol):
    """How weights become a map: the one choice a device makes about them."""

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None = None, /) -> LinearMap: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """The map as it stands; several maps of one input are one by stacking their rows."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map [T, I] to [T, O]."""
        return F.linear(x_TI, self.weight_OI, self.bias_O)
