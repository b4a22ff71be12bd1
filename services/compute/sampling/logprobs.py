"""Log-probabilities of the raw model distribution, for the rows that ask for them.

Shape legend: L rows that ask, V vocabulary, N largest number asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from common.messages.tokens import TokenLogprobs
from services.compute.kernels.launch import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Taken before penalties, bias, temperature and cuts, which overwrite the logits."""

    samples: Int64Array  # [L], which sample each row is of
    wanted: Int64Array  # [L], how many of the most likely
    logprobs_LV: Tensor

    @staticmethod
    def of(logits_SV: Tensor, num_logprobs: Int64Array) -> RawLogprobs | None:
        """For samples with num_logprobs [S] of 0 or more; None if none asks."""
        samples = np.nonzero(num_logprobs >= 0)[0]
        if not len(samples):
            return None
        index = upload(samples, logits_SV.device)
        logprobs_LV = logits_SV.index_select(0, index).log_softmax(dim=-1)
        return RawLogprobs(samples, num_logprobs[samples], logprobs_LV)

    def pick(self, tokens_S: Tensor) -> PickedLogprobs:
        """Those of the drawn tokens and of the most likely."""
        index = upload(self.samples, tokens_S.device)
        chosen_L = self.logprobs_LV.gather(1, tokens_S.index_select(0, index)[:, None])[:, 0]
        top = self.logprobs_LV.topk(int(self.wanted.max()), dim=-1)
        return PickedLogprobs(self.samples, self.wanted, chosen_L, top.indices, top.values)


@dataclass(frozen=True, slots=True)
class PickedLogprobs:
    """What a step's result needs of them."""

    samples: Int64Array
    wanted: Int64Array
    chosen_L: Tensor
    top_ids_LN: Tensor
    top_logprobs_LN: Tensor

    def to_host(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By sample."""
        rows = zip(
            self.samples.tolist(),
            self.wanted.tolist(),
            self.chosen_L.tolist(),
            self.top_ids_LN.tolist(),
            self.top_logprobs_LN.tolist(),
            strict=True,
        )
        return {
            sample: (TokenLogprobs(chosen, tuple(ids[:count]), tuple(values[:count])),)
            for sample, count, chosen, ids, values in rows
        }
