"""The stream of a runner that runs where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from torch import Tensor

from services.compute.kv.transfer import PagePairs
from services.compute.layers.paged_cache import copy_pages


class HostMark:
    """A mark on a device that has done everything before the call returns."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: HostMark) -> float:
        return (other._at_s - self._at_s) * 1e3


class HostStream:
    """Runs every launch where it stands: kernels in Triton's interpreter, on the CPU."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Callable[[], None]] = {}

    def rehearse(self, launch: Callable[[], None]) -> None:
        pass

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        self._launches[name] = launch

    def replay(self, name: Hashable) -> None:
        self._launches[name]()

    def mark(self) -> HostMark:
        return HostMark()

    def synchronize(self) -> None:
        pass

    def beside(self) -> LateCopies:
        return LateCopies()


class LateMark(HostMark):
    """The end of copies that are done at the third look, or when they are waited for."""

    def __init__(self, copies: LateCopies) -> None:
        super().__init__()
        self._copies = copies
        self._num_looks = 0

    def query(self) -> bool:
        self._num_looks += 1
        if self._num_looks == 3:
            self._copies.finish(self)
        return self._num_looks >= 3

    def synchronize(self) -> None:
        self._num_looks = 3
        self._copies.finish(self)


class LateCopies:
    """Copies that are done as late as can be, one transfer after the other."""

    def __init__(self) -> None:
        self._waiting: dict[HostMark, Callable[[], None]] = {}

    def copy_pages(self, source: Tensor, target: Tensor, pages: PagePairs) -> LateMark:
        mark = LateMark(self)
        self._waiting[mark] = lambda: copy_pages(source, target, pages)
        return mark

    def finish(self, mark: HostMark) -> None:
        """Do the copies up to this mark."""
        while mark in self._waiting:
            first = next(iter(self._waiting))
            self._waiting.pop(first)()

    def synchronize(self) -> None:
        for mark in list(self._waiting):
            self.finish(mark)
