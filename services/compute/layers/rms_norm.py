"""Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, the mean taken in float32."""

    weight_E: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [..., E]."""
        return F.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
