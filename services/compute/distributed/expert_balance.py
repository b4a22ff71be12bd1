"""Which ranks should have which experts as a whole, so that all have about as much to do: pure.

At a start all experts are placed (`balanced`); while a model serves, copies of experts give way to
others, one at a time (`better`).

After DeepSeek's EPLB (2025): the experts that most tokens go to get copies; then, the heaviest
first, each goes to the ranks that have least to do so far (Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple, TypeAlias

import numpy as np

from services.compute.distributed.shard import Holders, even
from services.compute.kernels.experts.routing import NOWHERE
from services.compute.step import Int32Array

Layout: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each rank the experts of a layer in its slots."""

MAX_TURNS = 64
"""Rows of a table of whose turn it is; copies whose number does not divide it get uneven shares."""

MIN_GAIN = 0.02
"""Of the mean work of ranks, by which the busiest one's has to become smaller."""

CANDIDATES = 4
"""Of the busiest rank's experts, and of the copies on each other rank."""


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


def num_turns(numbers: Iterable[int]) -> int:
    """After how many rows so many ranks that have an expert take turns as before."""
    return min(MAX_TURNS, lcm(*numbers))


def slot_table(layout: Layout, rank: int, num_experts: int, turns: int) -> Int32Array:
    """Of each turn and expert the slot of this rank, or `NOWHERE`."""
    table = np.full((turns, num_experts), NOWHERE, dtype=np.int32)
    holders = holders_of(layout, num_experts)
    for slot, expert in enumerate(layout[rank]):
        ranks = holders[expert]
        table[ranks.index(rank) :: len(ranks), expert] = slot
    return table


def layout_of(holders: Holders, num_ranks: int) -> Layout:
    """The experts of each rank, by slot, in their order."""
    return tuple(
        tuple(expert for expert, ranks in enumerate(holders) if rank in ranks)
        for rank in range(num_ranks)
    )


def holders_of(layout: Layout, num_experts: int) -> Holders:
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for rank, experts in enumerate(layout):
        for expert in experts:
            found[expert].append(rank)
    return tuple(map(tuple, found))


class Replacement(NamedTuple):
    """A slot is given to another expert; the one that was there has a copy elsewhere."""

    rank: int
    slot: int
    expert: int

    def of(self, layout: Layout) -> Layout:
        """The layout behind it."""
        own = list(layout[self.rank])
        own[self.slot] = self.expert
        return (*layout[: self.rank], tuple(own), *layout[self.rank + 1 :])


def better(layout: Layout, tokens_X: Sequence[int]) -> Replacement | None:
    """What makes the busiest rank's work smallest, of a few candidates; None if it gains little."""
    holders = holders_of(layout, len(tokens_X))
    share_X = [tokens / len(ranks) for tokens, ranks in zip(tokens_X, holders, strict=True)]
    load = [sum(share_X[expert] for expert in experts) for experts in layout]
    busiest = max(range(len(load)), key=lambda rank: (load[rank], -rank))
    least, found = load[busiest] - MIN_GAIN * sum(load) / len(load), None
    wanted = sorted(layout[busiest], key=lambda expert: (-share_X[expert], expert))[:CANDIDATES]
    for expert in wanted:
        for rank, experts in enumerate(layout):
            if rank in holders[expert]:
                continue
            copies = [slot for slot, each in enumerate(experts) if len(holders[each]) > 1]
            copies.sort(key=lambda slot: (share_X[experts[slot]], slot))
            for slot in copies[:CANDIDATES]:
                most = max(_behind(load, tokens_X, holders, expert, experts[slot], rank))
                if most < least:
                    least, found = most, Replacement(rank, slot, expert)
    return found


def _behind(
    load: Sequence[float], tokens_X: Sequence[int], holders: Holders, new: int, old: int, rank: int
) -> list[float]:
    """The work of all ranks once a rank has one expert in place of another."""
    load = list(load)
    for expert, ranks in ((new, {*holders[new], rank}), (old, {*holders[old]} - {rank})):
        for each in holders[expert]:
            load[each] -= tokens_X[expert] / len(holders[expert])
        for each in ranks:
            load[each] += tokens_X[expert] / len(ranks)
    return load
