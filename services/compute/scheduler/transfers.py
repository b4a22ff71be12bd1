"""Transfers: pages on their way between device and host, leased until they are there."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from services.compute.kv.memory import KVMemory, PagePool
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.scheduler.sequence import Sequence


class Transfer(NamedTuple):
    """What the runner is given, and the number by which the scheduler hears of its end."""

    number: int
    direction: Direction
    pages: PagePairs


class Transfers:
    """Those to be started, and those under way with the sequences whose pages they move.

    Both sides of a transfer are leased until its end: what is read must not change, and what is
    written must not be written by others, whatever becomes of the sequence meanwhile.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._new: list[Transfer] = []
        self._under_way: dict[int, tuple[Transfer, Sequence]] = {}
        self._num_made = 0

    def start(
        self, direction: Direction, sources: array[int], targets: array[int], sequence: Sequence
    ) -> int:
        """Lease the pages and return the transfer's number."""
        number = self._num_made
        self._num_made += 1
        columns = (np.array(pages, dtype=np.int32) for pages in (sources, targets))
        transfer = Transfer(number, direction, PagePairs(*columns))
        source, target = self._pools(direction)
        source.lease(sources, arriving=False)
        target.lease(targets, arriving=True)
        self._new.append(transfer)
        self._under_way[number] = transfer, sequence
        return number

    def take(self) -> list[Transfer]:
        """Return those that the runner has to start, in this order."""
        if not self._new:
            return []
        taken, self._new = self._new, []
        return taken

    def end(self, number: int) -> Sequence:
        """End a transfer's leases; return its sequence."""
        transfer, sequence = self._under_way.pop(number)
        for pool, pages in zip(self._pools(transfer.direction), transfer.pages, strict=True):
            pool.end_lease(pages.tolist())
        return sequence

    def _pools(self, direction: Direction) -> tuple[PagePool, PagePool]:
        memory = self._memory
        if direction is Direction.TO_HOST:
            return memory.device, memory.host
        return memory.host, memory.device
