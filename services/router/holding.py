"""Callers that wait for a worker, each until one comes or its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HoldQueue:
    """Holds callers for `hold_s` at most, and `max_held` of them; it knows nothing of workers."""

    def __init__(self, hold_s: float, max_held: int, clock: Callable[[], float]) -> None:
        self.hold_s = hold_s
        self._max_held = max_held
        self.clock = clock
        self._held: dict[asyncio.Future[None], float] = {}  # until when

    def __len__(self) -> int:
        return len(self._held)

    def deadline(self) -> float:
        """Return until when a caller who comes now may wait."""
        return self.clock() + self.hold_s

    async def wait(self, until_s: float) -> bool:
        """Wait until it may be worth another try; False if it is time, or the queue is full."""
        if self.clock() >= until_s or len(self._held) >= self._max_held:
            return False
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[woken] = until_s
        try:
            await woken
        finally:
            del self._held[woken]
        return True

    def wake(self, now_s: float = float("inf")) -> None:
        """Wake the callers whose time is up at `now_s`, by default all of them."""
        for woken, until_s in self._held.items():
            if now_s >= until_s and not woken.done():
                woken.set_result(None)
