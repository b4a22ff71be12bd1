"""Embeddings on the CPU: hidden states of a prompt, added up as its chunks come.

Shape legend: T tokens, N slots, E hidden width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.model_folder import Pooling
from services.compute.runner.pooling import embedding_of, pooled_tokens
from services.compute.runner.uploads import StepUpload
from services.compute.step import Float32Array

TOKENS_AT_ONCE = 512  # normalised for a mean


class EagerPooler:
    """Sums of hidden states by slot, until the last chunk of a prompt is added."""

    def __init__(self, pooling: Pooling, num_slots: int, hidden_size: int) -> None:
        self._pooling = pooling
        self._sum_NE = torch.zeros(num_slots, hidden_size)

    def take(
        self, step: StepUpload, x_TE: Tensor, normed: Callable[[Tensor], Tensor]
    ) -> dict[int, Float32Array]:
        """Add a step's hidden states; returns the embeddings that are complete, by row."""
        embeddings = {}
        for part in pooled_tokens(step, self._pooling):
            sum_E = self._sum_NE[part.slot]
            if part.begins:
                sum_E.zero_()
            end = part.first + part.num_tokens
            for first in range(part.first, end, TOKENS_AT_ONCE):
                some_TE = normed(x_TE[first : min(first + TOKENS_AT_ONCE, end)])
                sum_E += some_TE.float().sum(dim=0)
            if part.ends:
                embeddings[part.row] = embedding_of(sum_E.numpy(), part.total, self._pooling)
        return embeddings
