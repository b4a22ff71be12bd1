"""Context parallelism: ranks that have the whole model and the whole KV cache share the tokens of
long chunks of prompts.

Each computes its own tokens of a chunk, gives their keys and values to the others, and lets its
queries see all of them. Everything else of a layer sees one token at a time.

Shape legend: T tokens of a rank's step, X whatever there is of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks

MIN_STRIPE = 64
"""Tokens: of shorter chunks each rank computes all. A GPU reads all weights for a few tokens as for
some hundred, and two ranks halve a chunk of 256 first."""

MAX_DEALT = 4
"""Chunks of a step that are dealt, the longest ones: each adds rows to the step."""

MORE_ROWS = 2 * MAX_DEALT
"""Rows that a rank's step may have beyond those that there were."""


class Deal(NamedTuple):
    """One rank's tokens of a chunk, counted from its first one."""

    head: range
    tail: range
    alike: range
    """Behind all stripes: what every rank computes."""


def deal_chunk(length: int, keeps_last: bool, rank: int, size: int) -> Deal | None:
    """Cut a chunk into twice as many stripes as there are ranks: one from its beginning and one
    from its end for each, so that all have as many tokens and their queries see as many keys.

    What the stripes leave is computed by all; with `keeps_last` the last token is a part of it.
    None: the chunk is too short to be dealt.
    """
    stripe = (length - keeps_last) // (2 * size)
    if stripe < MIN_STRIPE:
        return None
    last = 2 * size - 1 - rank
    return Deal(
        range(rank * stripe, (rank + 1) * stripe),
        range(last * stripe, (last + 1) * stripe),
        range(2 * size * stripe, length),
    )


class StoredTokens(Protocol):
    """Whose tokens of a step are stored."""

    def completed(self, x_TX: Tensor) -> Tensor:
        """Rows of this rank's tokens, and behind them those of all that other ranks have alone."""
        ...


class AllHere:
    """This process computes all tokens of the step."""

    def completed(self, x_TX: Tensor) -> Tensor:
        return x_TX


ALL_HERE = AllHere()


@dataclass(frozen=True, slots=True)
class DealtTokens:
    """Ranks have some tokens in common, and as many of their own each."""

    ranks: Ranks
    num_own: int

    def completed(self, x_TX: Tensor) -> Tensor:
        in_common = len(x_TX) - self.num_own
        return torch.cat((x_TX[:in_common], self.ranks.below_one_another(x_TX[in_common:])))
