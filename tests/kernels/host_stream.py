"""The stream of a runner that runs where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


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

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        self._launches[name] = launch

    def replay(self, name: Hashable) -> None:
        self._launches[name]()

    def mark(self) -> HostMark:
        return HostMark()

    def synchronize(self) -> None:
        pass
