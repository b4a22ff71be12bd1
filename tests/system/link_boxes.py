"""Real inboxes that keep what they get, for the tests of the links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from common.config import LinkSettings
from common.link.sockets import ZmqTransport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort
from common.messages.generate import ComputeInbox
from tests.patience import PATIENCE_S

A = AttemptId("r", 1)
LOOPS = (uvloop.run, asyncio.run)


class Box:
    """A bound inbox that keeps what it gets."""

    def __init__(self, settings: LinkSettings, name: str, inbox: Any = ComputeInbox) -> None:
        self.transport = ZmqTransport(settings, name, inbox)
        self.got: list[Any] = []
        self.lost: list[Address] = []
        self._news = asyncio.Event()

    def open(self) -> Box:
        self.transport.open(self.deliver, self.peer_lost)
        return self

    def deliver(self, message: Any, sender: Address) -> None:
        self.got.append(message)
        self._news.set()

    def peer_lost(self, peer: Address) -> None:
        self.lost.append(peer)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for news that make it true; counters have no news, so look now and then too."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self._news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.01)

    @property
    def counters(self) -> list[int]:
        return [message.attempt.counter for message in self.got]


@asynccontextmanager
async def boxes(settings: LinkSettings, *names: str) -> AsyncIterator[list[Box]]:
    made = [Box(settings, name).open() for name in names]
    try:
        yield made
    finally:
        for box in made:
            await box.transport.close(0.0)


def abort(counter: int) -> Abort:
    return Abort(AttemptId("r", counter), "lost")


def ipc_settings(tmp_path: Path) -> LinkSettings:
    """Settings for inboxes in a private folder."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return LinkSettings(run_dir=str(run_dir))


def tcp(**more: Any) -> LinkSettings:
    """Settings for inboxes on loopback tcp, without keys unless `curve_dir` names some."""
    return LinkSettings(bind="tcp://127.0.0.1:0", insecure="curve_dir" not in more, **more)
