"""Reads streamed answers as bytes: counts and times events, and parses only the usage."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

EVENT = b"data: "
NEXT_EVENT = b"\ndata: "  # a raw line end is never part of an event's JSON
ERROR_EVENT = b'data: {"error"'
DONE_EVENT = b"data: [DONE]"
NO_CHOICES = b'"choices":[]'  # the usage chunk; inside of a text its quotes would be escaped
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Reply:
    """The reply to one request; times are `time.monotonic()`, 0 if there was nothing."""

    number: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0
    num_events: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between events with tokens
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class StreamReader:
    """Reads one answer after the other from a connection's bytes."""

    def __init__(self) -> None:
        self._reply: Reply | None = None
        self._tail = self._ending = b""
        self._in_head = True
        self._done = False

    def begin(self, reply: Reply) -> None:
        """Expect this answer next."""
        self._reply = reply
        self._tail = self._ending = b""
        self._in_head = True
        self._done = False

    def feed(self, data: bytes, now_s: float) -> bool:
        """Take received bytes; returns True when the answer has ended, well or with an error."""
        reply = self._reply
        if reply is None:
            return False
        lines = self._tail + data if self._tail else data
        if self._in_head:
            end = lines.find(b"\r\n\r\n")
            if end < 0:
                self._tail = lines
                return False
            if lines[9:12] != b"200" or b"chunked" not in lines[:end].lower():
                return self._fail(reply, lines, now_s)
            self._in_head = False
            lines = lines[end + 4 :]
        if lines[-1:] == b"\n":
            self._tail = b""
        else:
            end = lines.rfind(b"\n") + 1
            self._tail = lines[end:]
            lines = lines[:end]
        return self._take(reply, lines, now_s)

    def _take(self, reply: Reply, lines: bytes, now_s: float) -> bool:
        """Take whole lines of a stream."""
        num_events = lines.count(NEXT_EVENT) + lines.startswith(EVENT)
        if ERROR_EVENT in lines:
            return self._fail(reply, lines[lines.index(ERROR_EVENT) :], now_s)
        if NO_CHOICES in lines:
            num_events -= 1
            reply.usage = _usage(lines)
        if DONE_EVENT in lines and not self._done:
            num_events -= 1
            self._done = True
        if num_events > 0:
            self._note(reply, num_events, now_s)
        if not self._done:
            return False
        self._ending = (self._ending + lines)[-len(LAST_CHUNK) :]
        if self._ending != LAST_CHUNK:
            return False
        reply.end_s = now_s
        self._reply = None
        return True

    def lost(self, error: str, now_s: float) -> None:
        """End the expected answer, if there is one."""
        if self._reply is not None:
            self._fail(self._reply, error.encode(), now_s)

    def _note(self, reply: Reply, num_events: int, now_s: float) -> None:
        if reply.first_s:
            reply.gaps_s.append(now_s - reply.last_s)
        else:
            reply.first_s = now_s
        if num_events > 1:
            reply.gaps_s.extend([0.0] * (num_events - 1))
        reply.last_s = now_s
        reply.num_events += num_events

    def _fail(self, reply: Reply, text: bytes, now_s: float) -> bool:
        reply.error = text[:400].decode(errors="replace")
        reply.end_s = now_s
        self._reply = None
        return True


def _usage(lines: bytes) -> dict[str, Any]:
    begin = lines.rindex(EVENT, 0, lines.index(NO_CHOICES)) + len(EVENT)
    return dict(json.loads(lines[begin : lines.index(b"\n", begin)])["usage"])
