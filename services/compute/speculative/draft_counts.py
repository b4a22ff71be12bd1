"""What became of drafts: how many there were and which were right, by what they were from.

Shape legend: D drafters, K drafts of a row, S samples.
"""

from __future__ import annotations

import numpy as np

from common.messages.control import DraftReport
from common.speculative import HEADS
from services.compute.step import Int32Array

NGRAM, PREDICTION, GRAMMAR, DRAFT_MODEL, SUFFIX, EAGLE, EAGLE3, MEDUSA, MTP = range(9)
DRAFTERS = ("ngram", "prediction", "grammar", "draft_model", "suffix", *HEADS)
"""What drafts are from, by number: the text itself, the client's prediction, a grammar that forces
them, a small model, past answers, or heads that see the model's hidden states."""


class DraftCounts:
    """Counts since the start; adding a step's takes two passes over its rows."""

    def __init__(self, max_drafts: int) -> None:
        self._width = max_drafts + 1
        self._rows_DK = np.zeros((len(DRAFTERS), self._width), dtype=np.int64)  # by drafts right
        self._offered_D = np.zeros(len(DRAFTERS), dtype=np.int64)

    def add(self, drafters_S: Int32Array, offered_S: Int32Array, right_S: Int32Array) -> None:
        """Count rows with so many drafts, of which so many, the first of them, were right."""
        there = offered_S > 0
        drafters, offered, right = drafters_S[there], offered_S[there], right_S[there]
        cells = drafters * self._width + right
        counts = np.bincount(cells, minlength=self._rows_DK.size)
        self._rows_DK += counts.reshape(self._rows_DK.shape)
        weighted = np.bincount(drafters, weights=offered, minlength=len(DRAFTERS))
        self._offered_D += weighted.astype(np.int64)

    @property
    def num_offered(self) -> int:
        return int(self._offered_D.sum())

    @property
    def num_right(self) -> int:
        return int((self._rows_DK * np.arange(self._width)).sum())

    def reports(self) -> tuple[DraftReport, ...]:
        """The counts of each drafter that had any."""
        at_least_DK = self._rows_DK[:, ::-1].cumsum(axis=1)[:, ::-1]
        return tuple(
            DraftReport(name, num_rows, num_offered, tuple(accepted))
            for name, num_offered, (num_rows, *accepted) in zip(
                DRAFTERS, self._offered_D.tolist(), at_least_DK.tolist(), strict=True
            )
            if num_offered
        )
