"""Parses large request bodies in a process of its own, so that no stream waits for them.

A thread does not do: it holds the interpreter while it parses. With 8 MB of empty arrays the loop
stood still for 1.07 s, with as many bytes of fields 0.25 s, of token ids 0.1 s.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from common.child_main import framed
from common.child_process import ChildExit, Exited, PipedChild, Received, RestartingChild, Spawn
from common.messages.failure import Failure
from services.router.errors import ApiError
from services.router.json_child import unpack_fields

PARSE_TIMEOUT_S: Final = 10.0  # of one body; 8 MB take up to 0.5 s
WAIT_TIMEOUT_S: Final = 60.0  # with those before it
MAX_TRIES: Final = 2

_FAILED: Final = Failure(503, "overloaded", "the request could not be read; try again", None, True)


def spawn_parser(received: Received, exited: Exited) -> PipedChild:
    return PipedChild("services.router.json_child", [], received, exited)


@dataclass(slots=True, eq=False)
class _Job:
    frame: bytes
    fields: asyncio.Future[dict[str, Any]]
    num_tries: int = 0
    deadline_s: float = 0.0


class JsonParser:
    """Parses one body at a time, first come, first served; a `ChildOwner` of its process.

    The process starts with the first body. One that dies or takes too long is replaced, and its
    body tried once more.
    """

    def __init__(
        self, spawn: Spawn = spawn_parser, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._child = RestartingChild(spawn, self, clock, PARSE_TIMEOUT_S)
        self._running: _Job | None = None
        self._waiting: deque[_Job] = deque()
        self._log = structlog.get_logger()

    async def parse(self, body: bytes | bytearray) -> dict[str, Any]:
        """Parse a body as `json_body.parse` does; ApiError 400, or 503 if that fails.

        Token ids of prompts come as arrays of the type `i`.
        """
        job = _Job(framed(bytes(body)), asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._child.start()
        self._begin()
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                return await job.fields
        except TimeoutError:
            raise ApiError(_FAILED, 1.0) from None
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    def tick(self, now_s: float) -> None:
        """Start a process that is due; kill one that takes too long."""
        self._child.tick(now_s)
        if self._running is not None and now_s >= self._running.deadline_s:
            self._child.kill()

    def close(self) -> None:
        """End the process for good."""
        self._child.close()

    def child_ready(self, child: RestartingChild) -> None:
        self._begin()

    def child_broken(self, child: RestartingChild, why: str) -> None:
        self._log.error("parser cannot load", error=why)

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None:
        job, self._running = self._running, None
        if job is not None and not job.fields.done():
            match report:
                case ["parsed", packed]:
                    job.fields.set_result(unpack_fields(packed))
                case [_, code, message]:
                    job.fields.set_exception(ApiError(Failure(400, code, message)))
        self._begin()

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        self._log.warning("parser ended", status=exit.status, error=exit.error)
        job, self._running = self._running, None
        if job is None or job.fields.done():
            return
        if job.num_tries < MAX_TRIES:
            self._waiting.appendleft(job)
        else:
            job.fields.set_exception(ApiError(_FAILED, 1.0))

    def _begin(self) -> None:
        if self._running is not None or not self._waiting or not self._child.is_ready:
            return
        job = self._running = self._waiting.popleft()
        job.num_tries += 1
        job.deadline_s = self._clock() + PARSE_TIMEOUT_S
        self._child.send(job.frame)
