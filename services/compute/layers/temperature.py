"""Scores that grow with the context, so that a long one does not level them (Nakanishi, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Temperature:
    """A query n times `floor` positions on counts 1 + strength * log(1 + n) times (Llama 4)."""

    floor: int
    strength: float

    def at(self, positions_T: Tensor) -> Tensor:
        """What queries at these positions are multiplied by, in float32."""
        floors_T = torch.floor((positions_T.float() + 1.0) / self.floor)
        return torch.log1p(floors_T) * self.strength + 1.0
