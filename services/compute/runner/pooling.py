"""Pooling, as it is the same on every device: which tokens of a step, and the embedding of a sum.

Shape legend: E hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.model_folder import Pooling
from services.compute.runner.uploads import StepUpload
from services.compute.step import Float32Array

SMALLEST_NORM = 1e-12  # as torch's normalize


class PooledTokens(NamedTuple):
    """Tokens from `first` on of a plan, whose hidden states a row adds to its slot's sum.

    `begins` empties the sum before; with `ends` the row's embedding is complete, of `total` tokens.
    """

    row: int
    slot: int
    first: int
    num_tokens: int
    begins: bool
    ends: bool
    total: int


def pooled_tokens(upload: StepUpload, pooling: Pooling) -> list[PooledTokens]:
    """The tokens that a step's pooled rows add; no entry for a row that adds and ends nothing."""
    parts = []
    for row, ends in ((pool.row, pool.ends) for pool in upload.pools()):
        _, slot, start, first, length = upload.chunk(row)
        total, begins = 1, start == 0
        match pooling.kind:
            case "mean":
                num_tokens, total = length, start + length
            case "last":
                first, num_tokens, begins = first + length - 1, int(ends), ends
            case "cls":
                num_tokens = int(begins)
        if num_tokens or ends:
            parts.append(PooledTokens(row, slot, first, num_tokens, begins, ends, total))
    return parts


def embedding_of(sum_E: Float32Array, total: int, pooling: Pooling) -> Float32Array:
    """The embedding of a complete sum of hidden states."""
    mean_E = sum_E / np.float32(total)
    if pooling.normalize:
        mean_E /= np.float32(max(float(np.linalg.norm(mean_E)), SMALLEST_NORM))
    return mean_E
