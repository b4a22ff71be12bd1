"""Which part of a model a rank has: of its layers, of widths that are split, and of the heads of
attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from common.errors import ConfigError

UNITS = (128, 64, 32)
"""Multiples that parts are made of: groups of quantised weights and tiles of kernels are whole."""

SMALL_UNITS = (16, 8, 4, 2, 1)
"""Of widths that are multiples of none of these, or too small to give each rank one."""


Holders: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each expert of a layer the ranks that have it as a whole, in the order of their turns."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """Where whole experts are."""

    num_ranks: int
    by_layer: Mapping[int, Holders] = field(default_factory=dict)
    moves: bool = False  # copies are exchanged while the model serves

    def holders(self, layer: int, num_experts: int) -> Holders:
        """As said of the layer; else each rank has some that follow one another."""
        if layer in self.by_layer:
            return self.by_layer[layer]
        parts = [even(num_experts, self.num_ranks, rank) for rank in range(self.num_ranks)]
        return tuple((rank,) for rank, part in enumerate(parts) for _ in part)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The heads of one rank: queries, and the keys and values that they meet."""

    queries: range
    kv: range
    num_heads: int  # of all ranks
    num_kv_heads: int
    counts_kv: bool = True
    """False: a rank before this one has the same keys, and counts them where all are counted."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place among all, and its stage's; parts are contiguous, in the order of ranks and
    of stages, and may differ."""

    rank: int = 0
    size: int = 1
    placement: ExpertPlacement | None = None  # of whole experts; None: a rank has a part of each
    stage: int = 0
    num_stages: int = 1
    has_head: bool = False  # one that drafts, for which the last stage looks tokens up as well

    @property
    def is_first(self) -> bool:
        """Whether its stage begins with tokens, not with what another one has made of them."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage makes logits."""
        return self.stage == self.num_stages - 1

    def layers(self, count: int) -> range:
        """The stage's of so many, of which there is one for each."""
        return even(count, self.num_stages, self.stage)

    def part(self, count: int) -> range:
        """The rank's part of a width or a vocabulary, in the unit that makes the largest part
        smallest. Raises ConfigError if there is not one for each."""
        units = [unit for unit in (*UNITS, *SMALL_UNITS) if not count % unit]
        units = [unit for unit in units if count // unit >= self.size]
        if not units:
            raise ConfigError(
                f"compute.tensor_parallel_size is {self.size}, and the model has a width of "
                f"{count}, of which each rank needs a part; lower it."
            )

        def largest_part(unit: int) -> int:
            return -(-count // unit // self.size) * unit

        unit = min([unit for unit in units if unit in UNITS] or units[:1], key=largest_part)
        part = even(count // unit, self.size, self.rank)
        return range(part.start * unit, part.stop * unit)

    def expert_part(self, width: int) -> range:
        """The rank's part of the inner width of an expert that it has."""
        return self.part(width) if self.placement is None else range(width)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadPart:
        """Whole groups of queries with their kv head, as long as each rank gets one; else ranks
        share a kv head, and split its queries, of which there is one for each."""
        group = num_heads // num_kv_heads
        if num_kv_heads >= self.size:
            kv = even(num_kv_heads, self.size, self.rank)
            queries = range(kv.start * group, kv.stop * group)
            return HeadPart(queries, kv, num_heads, num_kv_heads)
        ranks_of = (even(self.size, num_kv_heads, head) for head in range(num_kv_heads))
        head, ranks = next(pair for pair in enumerate(ranks_of) if self.rank in pair[1])
        part = even(group, len(ranks), self.rank - ranks.start)
        queries = range(head * group + part.start, head * group + part.stop)
        counts_kv = self.rank == ranks.start
        return HeadPart(queries, range(head, head + 1), num_heads, num_kv_heads, counts_kv)


def even(count: int, parts: int, number: int) -> range:
    """One of so many parts of a count, the first ones larger by one where it does not divide."""
    size, more = divmod(count, parts)
    start = number * size + min(number, more)
    return range(start, start + size + (number < more))


WHOLE = Shard()
