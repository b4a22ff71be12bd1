"""What the processes of ranks on one host tell one another: gloo's messages over loopback.

On CPUs that is all; on GPUs sums and logits go through their memory (symmetric.py).

Shape legend: R ranks, N numbers.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed
from torch import Tensor

from common.errors import FatalError
from services.compute.distributed.shard import Shard
from services.compute.kernels.ranks.tree_sum import tree_sum

P = ParamSpec("P")
T = TypeVar("T")

c10d: Any = torch.distributed  # whose types leave out stores and what groups can do

LOOPBACK = "127.0.0.1"

TIMEOUT_S = 600.0
"""Of one meeting: ranks load parts of a model for different times."""


def fatal_if_a_rank_is_lost(method: Callable[P, T]) -> Callable[P, T]:
    """Ranks that have parted never meet again."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            raise FatalError(f"another rank of the model is lost: {error}") from error

    return guarded


class GlooRanks:
    """Every rank gathers what all have, and adds it up by itself: gloo's own sums have another
    order with each number of ranks."""

    @fatal_if_a_rank_is_lost
    def __init__(self, rank: int, size: int, store: str) -> None:
        """Meet the others through a file that all of them can open."""
        self.rank = rank
        self.size = size
        gloo = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        # not the default group of the process: that may be a GPU's
        self.store = c10d.FileStore(store, size)
        self._group = gloo(self.store, rank, size, options)
        atexit.register(self.close)

    def add_up(self, x: Tensor) -> None:
        x.copy_(tree_sum(self._gather(x.flatten())).view(x.shape))

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        widths = [len(Shard(rank, self.size).part(width)) for rank in range(self.size)]
        widest = x.new_zeros(*x.shape[:-1], max(widths))
        widest[..., : x.shape[-1]] = x
        parts = self._gather(widest)
        return torch.cat([part[..., :own] for part, own in zip(parts, widths, strict=True)], -1)

    def below_one_another(self, x_TX: Tensor) -> Tensor:
        return torch.cat(self._gather(x_TX.contiguous()))

    def of_first(self, x: Tensor) -> Tensor:
        first = x.clone()
        self._group.broadcast(first, 0).wait()
        return first

    def least(self, value: int) -> int:
        return min(int(each) for each in self._gather(torch.tensor(value)))

    def close(self) -> None:
        # Its threads end with it. One that lets go of the last tensor while Python ends aborts the
        # process: it wants a lock that there is no more.
        self._group = None

    @fatal_if_a_rank_is_lost
    def _gather(self, x: Tensor) -> list[Tensor]:
        """All ranks' x, in their order."""
        all_R = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([all_R], [x]).wait()
        return all_R
