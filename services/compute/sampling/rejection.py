"""Drafts that are drawn with noise of their own, and rejected so that what is said keeps its
distribution (Leviathan et al., 2023; Chen et al., 2023). It is there to be compared with noise that
drafts and tokens share.

A draft that was drawn with probability q counts with min(1, p / q), where p is the model's; in the
place of one that does not a token is drawn from what p exceeds q by. So what is drawn depends on
what was drafted: the seed still says it all, but for the same drafts.

Shape legend: R rows with a draft behind them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from services.compute.sampling.noise import gumbel_noise, gumbel_noise_at
from services.compute.step import BoolArray, Int64Array

DRAFT, ACCEPTANCE, RESIDUAL = (stream << 16 for stream in (1, 2, 3))
"""Added to the number of a choice, which is below 2^16: each has noise of its own."""


class Rejection:
    """What the drafts of a step were drawn from, until it is drawn which of them count."""

    def __init__(self) -> None:
        self._log_q_V: dict[tuple[int, int], Tensor] = {}  # by slot and number of the draft

    def keep(self, slots: Int64Array, number: int, log_q_RV: Tensor) -> None:
        """Drafts of this number were drawn from these distributions."""
        keys = ((slot, number) for slot in slots.tolist())
        self._log_q_V.update(zip(keys, log_q_RV, strict=True))

    def knows(self, slots: Int64Array, numbers: Int64Array) -> BoolArray:
        return np.array([key in self._log_q_V for key in self._keys(slots, numbers)], np.bool_)

    def take(self, slots: Int64Array, numbers: Int64Array) -> Tensor:
        """What drafts were drawn from, [R, V]; nothing is known afterwards."""
        log_q_RV = torch.stack([self._log_q_V[key] for key in self._keys(slots, numbers)])
        self.forget()
        return log_q_RV

    def forget(self) -> None:
        self._log_q_V.clear()

    @staticmethod
    def _keys(slots: Int64Array, numbers: Int64Array) -> Iterable[tuple[int, int]]:
        return zip(slots.tolist(), numbers.tolist(), strict=True)


def draw_or_reject(
    log_p_RV: Tensor, log_q_RV: Tensor, drafts_R: Tensor, accepts_4R: Tensor, residual_4R: Tensor
) -> Tensor:
    """Ids [R] of the drafts that count, and of what is drawn where they do not.

    Where a row stands in the noise of the one and of the other decision is given.
    """
    num_rows, vocab_size = log_p_RV.shape
    rows_R = torch.arange(num_rows)
    first_id_R = torch.zeros_like(rows_R)
    # For u between 0 and 1 that is -log u, which has to exceed log q/p.
    bound_R = gumbel_noise_at(accepts_4R, rows_R, first_id_R).neg().exp()
    residual_RV = (log_p_RV.exp() - log_q_RV.exp()).clamp_(min=0.0)
    counts_R = bound_R > log_q_RV[rows_R, drafts_R] - log_p_RV[rows_R, drafts_R]
    counts_R |= residual_RV.amax(dim=-1) <= 0.0  # the same distribution but for rounding
    others_R = residual_RV.log_().add_(gumbel_noise(residual_4R, vocab_size)).argmax(dim=-1)
    return torch.where(counts_R, drafts_R, others_R)
