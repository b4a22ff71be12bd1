"""Sums as a binary tree: neighbours first, then neighbouring pairs, then fours.

A subtree is a sum by itself. So whoever has half or a quarter of the summands adds up these alone,
and the sum has the same bits as where one has them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NUM_SEGMENTS = 8
"""Of a sum over the inputs of a map that ends a part: one rank has all of them, or several have as
many each."""


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32 at least. Of a number that is no power of two the last ones wait."""
    sums = [part.float() if part.dtype.itemsize < 4 else part for part in parts]
    while len(sums) > 1:
        pairs = [left + right for left, right in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0]
