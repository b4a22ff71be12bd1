"""Logits processors before a draw: penalties, with counts by slot; top_k, top_p and min_p.

Values equal to the last one that top_k or top_p keeps stay in, as in transformers, so that the
outcome is a threshold and does not depend on the order of equals. No sort of the vocabulary: the
largest few hundred values nearly always hold the mass that top_p asks for.

Shape legend: R rows, V vocabulary, C count rows, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.step import Float32Array, Int32Array, Int64Array


class PenaltyRows:
    """The tokens of each sequence with a penalty, for as long as it has its slot.

    Rows exist only for such slots: at 256 slots and a vocabulary of 150,000 all would be 190 MB.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row_by_slot: dict[int, int] = {}
        self._free: list[int] = []
        self._counts_CV = torch.zeros((0, vocab_size), dtype=torch.int32)
        self._prompt_CV = torch.zeros((0, vocab_size), dtype=torch.bool)

    def place(self, slot: int, prompt_ids: Int32Array, output_ids: Int32Array) -> None:
        """Give the slot to a sequence with a penalty, which has generated `output_ids` already."""
        row = self._row_by_slot.get(slot)
        if row is None:
            row = self._row_by_slot[slot] = self._take_row()
        counts = np.bincount(self._known(output_ids), minlength=self._vocab_size)
        self._counts_CV[row] = torch.from_numpy(counts.astype(np.int32))
        self._prompt_CV[row] = False
        self._prompt_CV[row].index_fill_(0, torch.from_numpy(self._known(prompt_ids)), True)

    def release(self, slot: int) -> None:
        """Give the slot to a sequence without penalties."""
        row = self._row_by_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def rows_of(self, slots: Sequence[int]) -> Int64Array:
        return np.array([self._row_by_slot[slot] for slot in slots], dtype=np.int64)

    def apply(
        self,
        logits_RV: Tensor,
        rows: Tensor,
        settings: tuple[Float32Array, Float32Array, Float32Array],
        drafted: tuple[Int64Array, Int64Array] | None = None,
    ) -> Tensor:
        """Penalised logits; `settings` are presence, frequency and repetition by row.

        Repetition looks at prompt and output, the other two at the output only, as in vLLM. Tokens
        of some rows (indices, ids) are `drafted`: said before these, though not counted yet.
        """
        presence, frequency, repetition = (torch.from_numpy(values)[:, None] for values in settings)
        counts_RV = self._counts_CV.index_select(0, rows)
        if drafted is not None:
            where = torch.from_numpy(drafted[0]), torch.from_numpy(drafted[1])
            counts_RV.index_put_(where, counts_RV.new_ones(()), accumulate=True)
        said_RV = counts_RV > 0
        if (settings[2] != 1.0).any():
            seen_RV = said_RV | self._prompt_CV.index_select(0, rows)
            weaker_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
            logits_RV = torch.where(seen_RV, weaker_RV, logits_RV)
        if settings[1].any():
            logits_RV = logits_RV - counts_RV * frequency
        if settings[0].any():
            logits_RV = logits_RV - said_RV * presence
        return logits_RV

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """These tokens were drawn: the next step's penalties know them, whatever the host knows."""
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self._counts_CV.index_put_((rows, tokens), ones, accumulate=True)

    def _take_row(self) -> int:
        if not self._free:
            held = self._counts_CV.shape[0]
            more = max(4, held)
            self._counts_CV = torch.cat(
                (self._counts_CV, self._counts_CV.new_zeros((more, self._vocab_size)))
            )
            self._prompt_CV = torch.cat(
                (self._prompt_CV, self._prompt_CV.new_zeros((more, self._vocab_size)))
            )
            self._free.extend(range(held + more - 1, held - 1, -1))
        return self._free.pop()

    def _known(self, ids: Int32Array) -> Int64Array:
        array = ids.astype(np.int64)
        return array[(array >= 0) & (array < self._vocab_size)]


Float64Array = npt.NDArray[np.float64]

FIRST_CANDIDATES = 512
MASS_UNIT = 2.0**40
"""Probability mass is counted in integers of this unit: their sum is exact in any order, so a
row's outcome does not change with the batch it is in."""


def apply_top_k(logits_RV: Tensor, top_k: Int32Array) -> None:
    """Set all but the k largest of each row to minus infinity; k is at least 1."""
    k_most = min(int(top_k.max()), logits_RV.shape[1])
    index = torch.from_numpy(np.minimum(top_k, k_most).astype(np.int64) - 1)[:, None]
    threshold = logits_RV.topk(k_most, dim=-1).values.gather(1, index)
    logits_RV.masked_fill_(logits_RV < threshold, -torch.inf)


def apply_top_p(logits_RV: Tensor, top_p: Float64Array) -> None:
    """Keep the smallest set of most likely ids whose mass reaches p; the first always stays.

    Rows have their maximum at 0.
    """
    vocab_size = logits_RV.shape[1]
    limit = torch.from_numpy(top_p)[:, None]
    limit = limit * _mass(logits_RV).sum(dim=-1, keepdim=True).double()
    candidates = FIRST_CANDIDATES
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


def apply_min_p(logits_RV: Tensor, min_p_log: Float32Array) -> None:
    """Keep ids at least min_p times as likely as the likeliest; rows have their maximum at 0."""
    threshold = torch.from_numpy(min_p_log)[:, None]
    logits_RV.masked_fill_(logits_RV < threshold, -torch.inf)


def _mass(logits: Tensor) -> Tensor:
    return logits.exp().mul_(MASS_UNIT).to(torch.int64)
