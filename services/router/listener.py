"""A router's share of the listening socket: from when to when it accepts, and how many."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import structlog
from aiohttp import web

from common.messages.failure import Failure
from services.router.errors import error_body

BACKLOG = 4096  # 100 clients connecting at once must not meet a full queue
RESERVED_FILES = 256  # for links, logs and libraries: libzmq ends the process that has none left
MAX_REFUSALS = 32  # connections that are being told; more are closed without a word
REFUSAL_S = 1.0  # for a client to read it
TELL_INTERVAL_S = 10.0
ALONE_S = 5.0  # until a router without workers accepts, too, and answers 503
QUIET_S = 1.0  # without a request, until a draining router closes what is still open
FULL = Failure(
    503, "too_many_connections", "this server has no room for another connection", None, True
)


def max_connections(max_open_files: int) -> int:
    """Return how many clients may be connected where a process may have so many files open."""
    return max_open_files - min(RESERVED_FILES, max_open_files // 2)


class Listener:
    """Listens for a server until `close`, and refuses connections beyond a bound.

    A socket that was inherited is shared with the other routers and the launcher: whom this one
    does not accept goes to another, or waits for one.
    """

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._max_connections = max_connections
        self._refusals: set[Refusal] = set()
        self._num_refused = 0  # since the log has told of it
        self._told_at_s = float("-inf")
        self._began_at_s: float | None = None
        self._now_s = self._busy_at_s = 0.0
        self._num_requests = 0
        self._listening: asyncio.Server | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int, listen_fd: int | None) -> int:
        """Bind and accept, or take an inherited socket and accept later; returns the port."""
        loop = asyncio.get_running_loop()
        if listen_fd is None:
            self._listening = await loop.create_server(
                self._protocol, host, port, backlog=BACKLOG, start_serving=False
            )
            self._accepting = asyncio.ensure_future(self._listening.start_serving())
            await self._accepting
        else:
            inherited = socket.socket(fileno=listen_fd)
            inherited.setblocking(False)
            self._listening = await loop.create_server(
                self._protocol, sock=inherited, backlog=BACKLOG, start_serving=False
            )
        return int(self._listening.sockets[0].getsockname()[1])

    def tick(self, now_s: float, ready: bool, idle: bool) -> None:
        """Accept once the router is `ready`; note when it was not `idle`, and tell of refusals."""
        self._now_s = now_s
        if self._began_at_s is None:
            self._began_at_s = now_s
        can_answer = ready or now_s - self._began_at_s >= ALONE_S
        if can_answer and self._listening is not None and self._accepting is None:
            self._accepting = asyncio.ensure_future(self._listening.start_serving())
        if not idle or self._num_requests != self._server.requests_count:
            self._num_requests = self._server.requests_count
            self._busy_at_s = now_s
        if self._num_refused and now_s - self._told_at_s >= TELL_INTERVAL_S:
            structlog.get_logger().warning(
                "connections refused", num=self._num_refused, max_connections=self._max_connections
            )
            self._num_refused, self._told_at_s = 0, now_s

    @property
    def is_quiet(self) -> bool:
        """Whether clients have left, or sent nothing for so long that their connections may end."""
        return not self._server.connections or self._now_s - self._busy_at_s >= QUIET_S

    def close(self) -> None:
        """Accept no more connections; those that there are stay."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
            self._busy_at_s = self._now_s

    def _protocol(self) -> asyncio.Protocol:
        if len(self._server.connections) < self._max_connections:
            return self._server()
        self._num_refused += 1
        return Refusal(self._refusals)


class Refusal(asyncio.Protocol):
    """Tells a client that there is no room, and closes the connection once that is read."""

    def __init__(self, refusals: set[Refusal]) -> None:
        self._refusals = refusals
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, base: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, base)  # uvloop's is none by its class
        if len(self._refusals) >= MAX_REFUSALS:
            transport.abort()
            return
        self._refusals.add(self)
        self._timer = asyncio.get_running_loop().call_later(REFUSAL_S, transport.close)
        body = error_body(FULL)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode("ascii") + body)
        # Closing before the client's request has been read would take the answer away from it.
        transport.write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self._refusals.discard(self)
        if self._timer is not None:
            self._timer.cancel()
