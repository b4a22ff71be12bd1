"""Log-probabilities of the raw model distribution: of drawn tokens, and of a prompt's own.

Shape legend: S samples, L rows that ask, P scored positions, E hidden width, V vocabulary,
N largest number asked for, K most likely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.messages.tokens import TokenLogprobs
from services.compute.step import Int32Array, Int64Array, RowScores


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Taken before penalties, bias, temperature and cuts, which overwrite the logits."""

    samples: Int64Array  # [L], which sample each row is of
    num_top: Int32Array  # [L], how many of the most likely are wanted
    logprobs_LV: Tensor

    @staticmethod
    def of(logits_SV: Tensor, num_logprobs: Int32Array) -> RawLogprobs | None:
        """For samples with num_logprobs [S] of 0 or more; None if none asks."""
        samples = np.nonzero(num_logprobs >= 0)[0]
        if not len(samples):
            return None
        logprobs_LV = logits_SV.index_select(0, torch.from_numpy(samples)).log_softmax(dim=-1)
        return RawLogprobs(samples, num_logprobs[samples], logprobs_LV)

    def pick(self, tokens_S: Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Those of the drawn tokens and of the most likely, by sample."""
        token_L1 = tokens_S.index_select(0, torch.from_numpy(self.samples))[:, None]
        chosen_L = self.logprobs_LV.gather(1, token_L1)[:, 0]
        top = self.logprobs_LV.topk(int(self.num_top.max()), dim=-1)
        rows = zip(
            self.samples.tolist(),
            self.num_top.tolist(),
            chosen_L.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            strict=True,
        )
        return {
            sample: (TokenLogprobs(chosen, tuple(ids[:count]), tuple(values[:count])),)
            for sample, count, chosen, ids, values in rows
        }


LOGITS_AT_ONCE = 1 << 23
"""Logits in memory at a time: 55 positions of 152,000 tokens, 32 MB, and three times that while
the most likely are sought."""

_LAST_ID = 0x7FFFFFFF


def score_prompt(
    x_PE: Tensor, targets: Int32Array, num_top: int, logits: Callable[[Tensor], Tensor]
) -> RowScores:
    """Score targets [P] by the hidden states before them; `logits` makes float32 [P, V] of those.

    The logprobs are of the raw distribution. Of equal logits that with the lower id comes first.
    """
    targets_P = torch.from_numpy(targets.astype("int64"))
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    first, step = 0, 1  # one position tells how many there is room for
    while first < len(targets_P):
        logits_PV = logits(x_PE[first : first + step])
        parts.append(_score(logits_PV, targets_P[first : first + step], num_top))
        first += step
        step = max(1, LOGITS_AT_ONCE // logits_PV.shape[1])
    logprobs, ranks, top_ids, top_logprobs = (
        torch.cat(column).numpy() for column in zip(*parts, strict=True)
    )
    return RowScores(logprobs, ranks.astype("int32"), top_ids.astype("int32"), top_logprobs)


def _score(
    logits_PV: Tensor, targets_P: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = targets_P[:, None]
    ranks_P = (logits_PV > logits_PV.gather(1, own)).sum(dim=-1) + 1
    top_ids_PK = _most_likely(logits_PV, min(num_top, logits_PV.shape[1]))
    logprobs_PV = logits_PV.log_softmax(dim=-1)
    return (
        logprobs_PV.gather(1, own)[:, 0],
        ranks_P,
        top_ids_PK,
        logprobs_PV.gather(1, top_ids_PK),
    )


def _most_likely(logits_PV: Tensor, count: int) -> Tensor:
    """Ids [P, K] of the largest logits; lower ids first where logits are equal."""
    if not count:
        return torch.zeros((len(logits_PV), 0), dtype=torch.int64)
    bits = (logits_PV + 0.0).view(torch.int32)  # the sum makes 0.0 of -0.0, which equals it
    order = (bits ^ ((bits >> 31) & _LAST_ID)).long()
    ids = torch.arange(logits_PV.shape[1])
    keys_PK = ((order << 32) | (ids ^ _LAST_ID)).topk(count, dim=-1).values
    return (keys_PK & _LAST_ID) ^ _LAST_ID
