"""Which draft rows count: the drafts up to them are what was drawn there.

What is drawn at a position follows from its logits and from noise by seed, output index and id
alone, however it came to be computed. So a draft is right if it is that token, and with drafts a
text is the same as without, for any sampling settings (drafter-invariant speculative decoding:
Daliri et al., 2024).

Shape legend: S rows on the device, which are sampled.
"""

from __future__ import annotations

import numpy as np

from services.compute.step import BoolArray, Int64Array

NO_DRAFT = -1


def accepted(tokens_S: Int64Array, numbers_S: Int64Array, drafts_S: Int64Array) -> BoolArray:
    """Rows by their draws, numbers and drafts (their inputs; NO_DRAFT where there was none)."""
    is_right = np.ones(len(tokens_S), dtype=np.bool_)
    is_right[1:] = (numbers_S[1:] == 0) | (tokens_S[:-1] == drafts_S[1:])
    return in_a_row(is_right, numbers_S)


def accepted_synthetic(
    indices_S: Int64Array, slots_S: Int64Array, numbers_S: Int64Array, rate: float
) -> BoolArray:
    """As if a share of all drafts were right, by chance that follows from index and slot."""
    mixed = (indices_S * 0x9E3779B1 + slots_S * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed ^= mixed >> 12
    return in_a_row((numbers_S == 0) | (mixed < int(rate * 0x100000000)), numbers_S)


def in_a_row(is_right: BoolArray, numbers_S: Int64Array) -> BoolArray:
    """Rows up to the first of their slot that is wrong."""
    first_S = np.arange(len(numbers_S)) - numbers_S
    num_wrong = np.cumsum(~is_right)
    within: BoolArray = num_wrong == num_wrong[first_S]
    return within
