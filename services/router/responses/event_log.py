"""The events of a response that is made in the background, for those who follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class EventLog:
    """Takes a stream's bytes as a transport does; keeps them by event and wakes who follows."""

    __slots__ = ("_changed", "_ended", "_events", "num_bytes")

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._changed: asyncio.Event = asyncio.Event()
        self.num_bytes = 0

    @property
    def num_events(self) -> int:
        """The events so far."""
        return len(self._events)

    def write(self, data: bytes) -> None:
        """Take events, whole ones."""
        self.num_bytes += len(data)
        self._events += (event + b"\n\n" for event in data.split(b"\n\n")[:-1])
        self._wake()

    def get_write_buffer_size(self) -> int:
        """Nothing waits here."""
        return 0

    def is_closing(self) -> bool:
        """It takes events to the end."""
        return False

    def abort(self) -> None:
        """End the log: no event follows."""
        self.end()

    def end(self) -> None:
        """Say that no event follows."""
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events whose number is above `after`, those to come as they come."""
        at = after + 1
        while True:
            changed = self._changed
            if at < len(self._events):
                events, at = self._events[at:], len(self._events)
                yield b"".join(events)
            elif self._ended:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
