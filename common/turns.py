"""Long work of the event loop in turns, between which everything else has its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

TURN_S = 0.003
MAX_STEPS = 64  # of one turn, 50 us each


class Turns:
    """Does work that is an iterator of steps, of which none takes long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._unfinished: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._unfinished)

    def begin(self, steps: Iterator[None]) -> None:
        """Do the first turn of some work now, and the others soon, beside other work."""
        if self._does_all(steps):
            return
        self._unfinished.append(steps)
        if len(self._unfinished) == 1:
            self._go_on_soon()

    def _go_on_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        steps = self._unfinished[0]
        try:
            if not self._does_all(steps):
                self._unfinished.append(steps)
        finally:
            self._unfinished.popleft()
            if self._unfinished:
                self._go_on_soon()

    def _does_all(self, steps: Iterator[None]) -> bool:
        """Do one turn's steps; returns whether these were the last."""
        until_s = self.clock() + TURN_S
        for number, _ in enumerate(steps, 1):
            if number >= MAX_STEPS or self.clock() >= until_s:
                return False
        return True
