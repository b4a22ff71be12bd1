"""What lies between the launches of a draw, and before it.

Shape legend: S samples, V vocabulary, N slots, C parts of the vocabulary.
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


@dataclass(frozen=True, slots=True)
class Shaped:
    """Rows that were adjusted, what cuts keep of rows, and what slots have said.

    Of a cut row ids are kept whose logit, less the row's maximum and divided by the temperature,
    has a magnitude with bits of at most `keep_S`. Raw logits stay as they were, for logprobs.
    """

    adjusted_SV: Tensor  # float32
    keep_S: Tensor  # int32
    top_S: Tensor  # float32, the maximum of a cut row
    said_NV: Tensor  # int32, times an id was generated, and a bit if it was in the prompt

    @staticmethod
    def make(num_slots: int, max_samples: int, vocab_size: int, device: torch.device) -> Shaped:
        """Room for the largest step and for every slot."""
        return Shaped(
            torch.zeros((max_samples, vocab_size), dtype=torch.float32, device=device),
            torch.zeros(max_samples, dtype=torch.int32, device=device),
            torch.zeros(max_samples, dtype=torch.float32, device=device),
            torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
        )
