"""What lies between the launches of the cuts.

Shape legend: S samples, V vocabulary, C parts of the vocabulary, K pivots, L launches that narrow,
M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PART = 4096
PIVOTS = 8
ROUNDS = 3
STATE = 8
"""Words of a search's state, of which low, high, the sum below low, the ids between the two, and
the limit of the sum are used."""

MAX_CANDIDATES = 4096


@dataclass(frozen=True, slots=True)
class CutScratch:
    """Partial sums and brackets of a search for a threshold."""

    top_SC: Tensor  # float32, the maximum of each part
    counts_2SCK: Tensor  # int32, ids of each part below each pivot; launches take turns
    masses_2SCK: Tensor  # int64, their mass
    state_SL: Tensor  # int64 [S, L, STATE]
    found_S: Tensor  # int32, candidates gathered so far
    candidates_SM: Tensor  # int32, keys

    @staticmethod
    def make(
        max_samples: int,
        vocab_size: int,
        device: torch.device,
        max_candidates: int = MAX_CANDIDATES,
    ) -> CutScratch:
        """Room for the largest step; `max_candidates` is a power of two."""
        parts = -(-vocab_size // PART)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return CutScratch(
            zeros(max_samples, parts, dtype=torch.float32),
            zeros(2, max_samples, parts, PIVOTS),
            zeros(2, max_samples, parts, PIVOTS, dtype=torch.int64),
            zeros(max_samples, ROUNDS + 1, STATE, dtype=torch.int64),
            zeros(max_samples),
            zeros(max_samples, max_candidates),
        )
