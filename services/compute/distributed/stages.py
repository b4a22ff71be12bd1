"""The stages of a model whose layers are split over several processes, seen from one of them.

Shape legend: T tokens, E hidden width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

WAIT_MS = 2
"""For hidden states, where the loop of who leads has to turn meanwhile."""


class Stages(Protocol):
    """Each stage has a run of the layers and computes every step, in the same order as all others:
    it goes on with the hidden states of the stage before, and gives its own to the next."""

    @property
    def number(self) -> int:
        """This one's, in the order of layers."""
        ...

    @property
    def count(self) -> int: ...

    @property
    def num_here(self) -> int:
        """How many of them share this host."""
        ...

    def send(self, x_TE: Tensor) -> None:
        """Give the next stage what this one has made of a step, in memory of the host that stays
        as it is, without waiting for it."""
        ...

    def receive(self, room_TE: Tensor, wait_ms: int) -> bool:
        """Write what the stage before has made of the next step to this memory of the host; False
        if it is not there within this time."""
        ...

    def least(self, value: int) -> int:
        """The smallest of all stages' values, of which each gives one."""
        ...

    def close(self) -> None: ...


class OneStage:
    """That of a model whose layers are all in one process, or in each of its ranks."""

    number = 0
    count = 1
    num_here = 1

    def send(self, x_TE: Tensor) -> None:
        raise RuntimeError("there is no next stage")

    def receive(self, room_TE: Tensor, wait_ms: int) -> bool:
        raise RuntimeError("there is no stage before")

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


ONE_STAGE = OneStage()
