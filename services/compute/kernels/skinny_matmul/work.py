"""Memory that the programs of a split product meet in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.kernels.skinny_matmul.config import (
    MAX_SPLIT_OUTPUTS,
    MAX_SPLITS,
    MAX_TOKENS,
    block_tokens,
)

MIN_BLOCK_OUT = 16


@dataclass(frozen=True, slots=True)
class SkinnyWork:
    """Partial sums, float32, and how many programs of each tile have written theirs.

    One for all launches of a stream: each leaves `arrivals` as zeros.
    """

    partial: Tensor
    arrivals: Tensor

    @classmethod
    def make(cls, max_tokens: int, max_out: int, device: torch.device) -> SkinnyWork:
        """For products of at most as many rows and outputs."""
        outputs = min(MAX_SPLIT_OUTPUTS, MAX_SPLITS * -(-max_out // 128) * 128)
        tokens = block_tokens(min(max_tokens, MAX_TOKENS))
        return cls(
            partial=torch.zeros(outputs * tokens, dtype=torch.float32, device=device),
            arrivals=torch.zeros(outputs // MIN_BLOCK_OUT, dtype=torch.int32, device=device),
        )
