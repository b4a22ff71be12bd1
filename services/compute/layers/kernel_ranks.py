"""What the ranks of a model leave one another in a step on GPUs: summands and parts of logits.

Shape legend: T tokens, E hidden width, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.distributed.symmetric import SymmetricBlock, default_group
from services.compute.kernels.ranks.rank_rows import (
    MAX_PROGRAMS,
    RankRows,
    add_up,
    share_best,
    side_by_side,
)
from services.compute.kernels.sampling.sample import VocabularyPart

Delta: TypeAlias = Tensor | RankRows
"""What a part has added to the residual stream: the whole of it, or a summand of each rank."""


class KernelRanks(Protocol):
    """Where the parts of a pass write what other ranks need, and what a launch makes of it."""

    is_split: bool

    def begin(self) -> None:
        """A pass begins."""
        ...

    def room(self, num_tokens: int) -> Tensor:
        """Memory [T, E] for what the part under way adds; it stays until it has been added."""
        ...

    def added_up(self, delta_TE: Tensor) -> Delta:
        """What is to be added, of what the part has written there; the next one begins."""
        ...

    def pairs_room(self, num_tokens: int, num_pairs: int) -> Tensor | None:
        """Memory [R, E] behind `room` for rows of pairs of a token and an expert, which ranks are
        to add up before they are weighted; None: each rank weights its own."""
        ...

    def add_up_pairs(self, num_tokens: int, num_pairs: int) -> None:
        """Replace what is in both rooms by the sums; the next part begins."""
        ...

    def end(self) -> None:
        """All has been added, or, of a model that is not split, is left to another graph."""
        ...

    def logits_room(self, logits_SV: Tensor) -> Tensor:
        """Memory for this rank's part of logits."""
        ...

    def complete(self, logits_SV: Tensor) -> None:
        """Bring all ranks' parts to where logits shall be."""
        ...

    def vocabulary_part(self, num_samples: int) -> VocabularyPart | None:
        """How so many samples are drawn from parts of logits; None: they need all."""
        ...

    def agree(self, words_NW: Tensor) -> None:
        """Replace these words (int32), no more than there are logits, by rank 0's."""
        ...


class OneRank:
    """All of a model is here."""

    is_split = False

    def __init__(self, delta_TE: Tensor) -> None:
        self._delta_TE = delta_TE

    def begin(self) -> None:
        pass

    def room(self, num_tokens: int) -> Tensor:
        return self._delta_TE[:num_tokens]

    def added_up(self, delta_TE: Tensor) -> Tensor:
        return delta_TE

    def pairs_room(self, num_tokens: int, num_pairs: int) -> None:
        return None

    def add_up_pairs(self, num_tokens: int, num_pairs: int) -> None:
        pass

    def end(self) -> None:
        pass

    def logits_room(self, logits_SV: Tensor) -> Tensor:
        return logits_SV

    def complete(self, logits_SV: Tensor) -> None:
        pass

    def vocabulary_part(self, num_samples: int) -> None:
        return None

    def agree(self, words_NW: Tensor) -> None:
        pass


class RankSizes(NamedTuple):
    """What ranks share memory for."""

    max_tokens: int
    width: int
    dtype: torch.dtype  # of summands
    max_samples: int
    logit_begins: tuple[int, ...]  # of each rank's part of the vocabulary, and their end
    top_k: int = 0  # experts of a token whose rows are added up one by one

    @property
    def max_rows(self) -> int:
        return self.max_tokens * (1 + self.top_k)


class SplitRanks:
    """Ranks that meet in memory which all of them read and write (kernels/ranks/rank_rows.py).

    Up to `MAX_PROGRAMS` rows are added up by the launch of the norm behind them. Two tensors take
    turns, so that a rank that is ahead does not write to what others still read; every pass begins
    with the same one, as a graph does.
    """

    is_split = True

    def __init__(self, block: SymmetricBlock, sizes: RankSizes) -> None:
        """The block has `num_bytes` of these sizes."""
        self._block = block
        self._begins = sizes.logit_begins
        self._adds_pairs = sizes.top_k > 0
        rows, logits, words = self._shapes(sizes)
        self._turns = [block.take(rows, sizes.dtype) for _ in range(2)]
        self._turn = 0
        self._logits = block.take(logits, torch.float32)
        self._words = block.take(words, torch.int32)
        rank = block.memory.rank
        self._num_logits = self._begins[rank + 1] - self._begins[rank]

    @staticmethod
    def num_bytes(sizes: RankSizes) -> int:
        (rows, logits, words), dtype = SplitRanks._shapes(sizes), sizes.dtype
        return SymmetricBlock.num_bytes(
            (rows, dtype), (rows, dtype), (logits, torch.float32), (words, torch.int32)
        )

    @staticmethod
    def _shapes(sizes: RankSizes) -> tuple[tuple[int, int], tuple[int], tuple[int, int]]:
        begins = sizes.logit_begins
        widest = max(end - begin for begin, end in zip(begins, begins[1:], strict=False))
        rows, logits = (sizes.max_rows, sizes.width), (sizes.max_samples * widest,)
        return rows, logits, (min(sizes.max_samples, MAX_PROGRAMS), 4)

    def begin(self) -> None:
        self._turn = 0

    def room(self, num_tokens: int) -> Tensor:
        return self._turns[self._turn].own[:num_tokens]

    def added_up(self, delta_TE: Tensor) -> Delta:
        rows = self._block.rows(self._turns[self._turn], len(delta_TE))
        self._turn = 1 - self._turn
        if len(delta_TE) <= MAX_PROGRAMS:
            return rows
        add_up(rows)
        return delta_TE

    def pairs_room(self, num_tokens: int, num_pairs: int) -> Tensor | None:
        own = self._turns[self._turn].own
        return own[num_tokens : num_tokens + num_pairs] if self._adds_pairs else None

    def add_up_pairs(self, num_tokens: int, num_pairs: int) -> None:
        add_up(self._block.rows(self._turns[self._turn], num_tokens + num_pairs))
        self._turn = 1 - self._turn

    def end(self) -> None:
        if self._turn:  # the last sum was of the tensor that the next pass begins with
            add_up(self._block.rows(self._turns[1], 1))

    def logits_room(self, logits_SV: Tensor) -> Tensor:
        num_samples = len(logits_SV)
        return self._logits.own[: num_samples * self._num_logits].view(num_samples, -1)

    def complete(self, logits_SV: Tensor) -> None:
        side_by_side(self._logits.addresses_R, self._begins, logits_SV, self._block.memory)

    def vocabulary_part(self, num_samples: int) -> VocabularyPart | None:
        if num_samples > MAX_PROGRAMS or any(begin % 4 for begin in self._begins[:-1]):
            return None
        memory = self._block.memory
        share = partial(share_best, self._words.addresses_R, memory=memory)
        return VocabularyPart(self._begins[memory.rank], share)

    def agree(self, words_NW: Tensor) -> None:
        own = self._logits.own[: words_NW.numel()]  # which nobody reads any more
        own.view(words_NW.dtype).view(words_NW.shape).copy_(words_NW)
        first_alone = (0, *[words_NW.shape[1]] * (len(self._begins) - 1))
        side_by_side(self._logits.addresses_R, first_alone, words_NW, self._block.memory)


def kernel_ranks(ranks: Ranks, sizes: RankSizes, delta_TE: Tensor) -> KernelRanks:
    """What a pass needs of the ranks; all of them make it at the same time."""
    if ranks.size == 1:
        return OneRank(delta_TE)
    num_bytes = SplitRanks.num_bytes(sizes)
    block = SymmetricBlock(num_bytes, delta_TE.device, default_group(ranks))
    return SplitRanks(block, sizes)
