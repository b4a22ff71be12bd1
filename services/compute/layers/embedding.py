"""The table that turns token ids into vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row v of the table is the vector of token v."""

    weight_VE: Tensor

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Look up [T] ids, all below V (the runner has checked them)."""
        return F.embedding(tokens_T, self.weight_VE)
