"""The stream that orders everything on the device, and the launches recorded for it.

A protocol, so that the runner's own logic is tested where there is no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol


class Mark(Protocol):
    """A point in the stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this mark to a later one, both passed."""
        ...


class DeviceStream(Protocol):
    """Launches by name: recorded once, replayed at every step."""

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        """Make `launch` replayable; it may run on the way, on whatever is in memory."""
        ...

    def replay(self, name: Hashable) -> None:
        """Launch again, without waiting."""
        ...

    def mark(self) -> Mark:
        """Mark the end of all that has been launched."""
        ...

    def synchronize(self) -> None:
        """Wait for all of it."""
        ...


class HostMark:
    """A mark on a device that has done everything before the call returns."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """It has passed."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, other: HostMark) -> float:
        """Milliseconds between the two calls."""
        return (other._at_s - self._at_s) * 1e3


class HostStream:
    """Runs every launch where it stands: kernels in Triton's interpreter, on the CPU."""

    def __init__(self) -> None:
        self._launches: dict[Hashable, Callable[[], None]] = {}

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        """Keep the function: there is nothing to warm up."""
        self._launches[name] = launch

    def replay(self, name: Hashable) -> None:
        """Call it."""
        self._launches[name]()

    def mark(self) -> HostMark:
        """Now."""
        return HostMark()

    def synchronize(self) -> None:
        """Nothing to wait for."""
