"""Which ranks should have which experts as a whole, so that all have about as much to do: pure.

After DeepSeek's EPLB (2025): the experts that most tokens go to get copies; then, the heaviest
first, each goes to the ranks that have least to do so far (Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from services.compute.distributed.shard import Holders, even

MAX_TURNS = 64
"""Rows of a table of whose turn it is; copies whose number does not divide it get uneven shares."""


def balanced(tokens_X: Sequence[int], num_ranks: int, num_redundant: int) -> Holders:
    """The ranks of each expert, of which so many tokens were counted.

    All have as many experts, or one more. `num_redundant` copies are made beside one of each; a
    rank has no expert twice, so that one for which no rank is left is left out.
    """
    copies_X = _copies(tokens_X, num_ranks, num_redundant)
    room = [len(even(sum(copies_X), num_ranks, rank)) for rank in range(num_ranks)]
    load, held = [0.0] * num_ranks, [0] * num_ranks
    share_X = [tokens / copies for tokens, copies in zip(tokens_X, copies_X, strict=True)]
    holders: list[tuple[int, ...]] = [()] * len(tokens_X)
    for expert in sorted(range(len(tokens_X)), key=lambda expert: -share_X[expert]):
        ranks = [rank for rank in range(num_ranks) if held[rank] < room[rank]]
        ranks.sort(key=lambda rank: (load[rank], held[rank]))
        holders[expert] = tuple(sorted(ranks[: copies_X[expert]]))
        for rank in holders[expert]:
            load[rank] += tokens_X[expert] / len(holders[expert])
            held[rank] += 1
    return tuple(holders)


def _copies(tokens_X: Sequence[int], num_ranks: int, num_redundant: int) -> list[int]:
    """One of each expert, and in turn one more of that whose copies have most to do."""
    copies_X = [1] * len(tokens_X)
    for _ in range(min(num_redundant, len(tokens_X) * (num_ranks - 1))):
        share, expert = max(
            (tokens_X[expert] / copies, -expert)
            for expert, copies in enumerate(copies_X)
            if copies < num_ranks
        )
        if share:
            copies_X[-expert] += 1
    return copies_X


def num_turns(holders: Holders) -> int:
    """After how many rows the ranks that have an expert take turns as before."""
    return min(MAX_TURNS, lcm(*map(len, holders)))
