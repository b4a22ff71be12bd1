"""What the programs that share a row's vocabulary leave for the one that picks.

Shape legend: S samples, C parts of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_PART = 1024
"""Ids of the smallest part: at one row, 126 of them keep all of an H200's processors busy."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The best of each part, and whether the part had a logit that is not finite."""

    best_SC: Tensor  # float32
    best_id_SC: Tensor  # int32
    broken_SC: Tensor  # int32

    @staticmethod
    def make(max_samples: int, vocab_size: int, device: torch.device) -> Parts:
        """Room for the largest step."""
        shape = (max_samples, -(-vocab_size // SMALL_PART))
        return Parts(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )
