"""top_k, top_p and min_p: which ids may be drawn at all.

Values equal to the last one kept stay in, as in transformers, so that the outcome is a threshold
and does not depend on the order of equals. No sort of the vocabulary: the largest few hundred
values nearly always hold the mass that top_p asks for.

Shape legend: R rows, V vocabulary, N candidates.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.kernels.launch import upload

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

FIRST_CANDIDATES = 512
MASS_UNIT = 2.0**40
"""Probability mass is counted in integers of this unit: their sum is exact in any order, so a
row's outcome does not change with the batch it is in."""


def cut_top_k(logits_RV: Tensor, top_k: Int64Array) -> None:
    """Set all but the k largest of each row to minus infinity; k is at least 1."""
    k_most = min(int(top_k.max()), logits_RV.shape[1])
    index = upload(np.minimum(top_k, k_most) - 1, logits_RV.device)[:, None]
    threshold = logits_RV.topk(k_most, dim=-1).values.gather(1, index)
    logits_RV.masked_fill_(logits_RV < threshold, -torch.inf)


def cut_top_p(logits_RV: Tensor, top_p: Float64Array) -> None:
    """Keep the smallest set of most likely ids whose mass reaches p; the first always stays.

    Rows have their maximum at 0.
    """
    vocab_size = logits_RV.shape[1]
    limit = upload(top_p, logits_RV.device)[:, None]
    limit = limit * _mass(logits_RV).sum(dim=-1, keepdim=True).double()
    # where asking the device stalls it, ask nothing and take all candidates at once
    candidates = FIRST_CANDIDATES if logits_RV.device.type == "cpu" else vocab_size
    while True:
        candidates = min(candidates, vocab_size)
        values_RN = logits_RV.topk(candidates, dim=-1).values
        mass_RN = _mass(values_RN)
        before_RN = mass_RN.cumsum(dim=-1) - mass_RN
        kept_RN = before_RN.double() < limit
        if candidates == vocab_size or not bool(kept_RN[:, -1].any()):
            break
        candidates *= 8
    kept_RN[:, 0] = True
    threshold = values_RN.masked_fill(~kept_RN, torch.inf).amin(dim=-1, keepdim=True)
    logits_RV.masked_fill_(logits_RV < threshold, -torch.inf)


def cut_min_p(logits_RV: Tensor, min_p: Float64Array) -> None:
    """Keep ids at least min_p times as likely as the likeliest; rows have their maximum at 0."""
    floors = np.array([math.log(p) if p > 0 else -math.inf for p in min_p], dtype=np.float32)
    threshold = upload(floors, logits_RV.device)[:, None]
    logits_RV.masked_fill_(logits_RV < threshold, -torch.inf)


def _mass(logits: Tensor) -> Tensor:
    return logits.exp().mul_(MASS_UNIT).to(torch.int64)
