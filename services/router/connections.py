"""Connections on which nothing moves: aiohttp by itself would keep them for ever."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aiohttp.http_exceptions import HttpProcessingError


class HttpTransport(Protocol):
    """What is asked of a connection's transport."""

    def get_write_buffer_size(self) -> int: ...


class Connection(Protocol):
    """What is asked of a connection; aiohttp's handlers have it. It has none once it is closed."""

    @property
    def transport(self) -> HttpTransport | None: ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)


@dataclass(slots=True)
class _Seen:
    """When something was last seen to move on a connection, and what was unsent then."""

    moved_at_s: float
    num_unsent: int = 0


class Connections(Generic[ConnectionT]):
    """Tells which connections to cut; pure, given the clock.

    One has `head_timeout_s` to send its first request's head, as a slow sender could hold as many
    as there are file descriptors; between further ones aiohttp's own keep-alive counts. One of
    which nothing of what is unsent leaves for `send_timeout_s` has nobody at its other end who
    reads.
    """

    def __init__(self, head_timeout_s: float, send_timeout_s: float) -> None:
        self._head_timeout_s = head_timeout_s
        self._send_timeout_s = send_timeout_s
        self._seen: dict[ConnectionT, _Seen] = {}
        self._spoken: set[ConnectionT] = set()

    def spoke(self, connection: ConnectionT) -> None:
        """Take note of a whole request head."""
        self._spoken.add(connection)

    def stuck(self, present: Collection[ConnectionT], now_s: float) -> list[ConnectionT]:
        """Return those to be cut among all that there are now; others are forgotten."""
        self._spoken.intersection_update(present)
        before, self._seen = self._seen, {}
        found = []
        for connection in present:
            transport = connection.transport
            if transport is None:
                continue
            num_unsent = transport.get_write_buffer_size()
            seen = before.get(connection) or _Seen(now_s)
            silent = connection not in self._spoken
            if num_unsent < seen.num_unsent or (not silent and not num_unsent):
                seen.moved_at_s = now_s
            seen.num_unsent = num_unsent
            self._seen[connection] = seen
            limit_s = self._head_timeout_s if silent else self._send_timeout_s
            if now_s - seen.moved_at_s >= limit_s:
                found.append(connection)
        return found


class FaultsOnly(logging.Filter):
    """Passes over what aiohttp says of clients that speak no HTTP.

    They are told by a 400; anybody could fill the log with errors and their traces otherwise.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record tells of a fault of this process."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)
