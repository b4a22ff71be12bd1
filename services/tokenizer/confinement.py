"""Limits of time and memory around code that is not trusted, set by the kernel.

A template is someone else's program, and input can make an honest one explode. The sandbox of
jinja2 keeps it from reaching out, but not from `'a' * 2_000_000_000` or `10 ** 10 ** 10`.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Confinement:
    """What code inside may use: wall time in seconds, and memory in bytes on top of what is used.

    Beyond the time SIGALRM kills the process, whatever it is busy with; beyond the memory Python
    raises MemoryError. Memory is bounded on Linux only, time everywhere.
    """

    timeout_s: float
    memory_bytes: int

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Hold the limits inside the block; setting and lifting them costs some 20 µs."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = self._address_space()
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        if limit is not None:
            allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _address_space(self) -> int | None:
        try:
            pages = int(_STATM.read_bytes().split(None, 1)[0])
        except OSError:
            return None
        return pages * resource.getpagesize() + self.memory_bytes
