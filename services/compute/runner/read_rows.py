"""The rows in which a drafter reads parts of texts.

Shape legend: R rows, T tokens, P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.compute.step import Int64Array

FEW = 8  # tokens that are rows of one each, as drafts are: chunks are attended to one by one


class ReadRows(NamedTuple):
    """Parts of few tokens as rows of one token each, which come first, then the others."""

    slots_R: Int64Array
    start_R: Int64Array
    len_R: Int64Array
    num_decodes: int  # rows of one token
    last_P: Int64Array  # where each part's last token is among all

    @staticmethod
    def of(slots_P: Int64Array, start_P: Int64Array, len_P: Int64Array) -> ReadRows:
        is_few_P = len_P <= FEW
        few, many = np.flatnonzero(is_few_P), np.flatnonzero(~is_few_P)
        slots_T, positions_T = tokens_of(slots_P[few], start_P[few], len_P[few])
        order = np.concatenate((few, many))
        last_P = np.empty_like(order)
        last_P[order] = np.cumsum(len_P[order]) - 1
        return ReadRows(
            np.concatenate((slots_T, slots_P[many])),
            np.concatenate((positions_T, start_P[many])),
            np.concatenate((np.ones_like(slots_T), len_P[many])),
            len(slots_T),
            last_P,
        )


def tokens_of(
    slots_R: Int64Array, start_R: Int64Array, len_R: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Slot and position of each token of rows."""
    first_R = np.cumsum(len_R) - len_R
    positions_T = np.arange(int(len_R.sum())) + np.repeat(start_R - first_R, len_R)
    return np.repeat(slots_R, len_R), positions_T
