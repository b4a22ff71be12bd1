"""The ranks of a model that several processes compute together, seen from one of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Ranks(Protocol):
    """Collective operations: every rank makes the same calls in the same order.

    Whatever they return is the same on all ranks to the last bit, so that ranks that are given the
    same uploads draw the same tokens and nothing has to be agreed upon.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def store(self) -> Any:
        """Torch's store, through which they have met; None of one that is alone."""
        ...

    def add_up(self, x: Tensor) -> None:
        """Replace x by the sum of all ranks' x: added as a tree (kernels/ranks/tree_sum.py), in
        float32, rounded once."""
        ...

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        """All ranks' x, in their order, as one tensor whose last dimension is `width`; ranks may
        have parts of different widths."""
        ...

    def below_one_another(self, x_TX: Tensor) -> Tensor:
        """All ranks' x, in their order, as one tensor; each has as many rows."""
        ...

    def of_first(self, x: Tensor) -> Tensor:
        """Rank 0's x."""
        ...

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        ...

    def close(self) -> None:
        """Part: no rank calls another one from here on."""
        ...


class Alone:
    """The one rank of a model that is not split."""

    rank = 0
    size = 1
    store = None

    def add_up(self, x: Tensor) -> None:
        pass

    def side_by_side(self, x: Tensor, width: int) -> Tensor:
        return x

    def below_one_another(self, x_TX: Tensor) -> Tensor:
        return x_TX

    def of_first(self, x: Tensor) -> Tensor:
        return x

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


ALONE = Alone()


class RankGroups(NamedTuple):
    """The ranks of a model by what each has of it; of one of the two this is the only one."""

    split: Ranks  # a part
    context: Ranks  # all, and they may share a step's tokens


NO_GROUPS = RankGroups(ALONE, ALONE)
