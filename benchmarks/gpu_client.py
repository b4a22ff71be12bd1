"""Clients that ask over HTTP and note when tokens come, in processes of their own.

They parse no more of a stream than they must, and what they cost is measured, so that they are not
what is measured. Requests are taken from one common list, each by whichever stream is free first.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.gpu_workloads import Ask

EVENT = b"data: "
NEXT_EVENT = b"\ndata: "  # a raw line end is never part of an event's JSON
ERROR_EVENT = b'data: {"error"'
DONE_EVENT = b"data: [DONE]"
NO_CHOICES = b'"choices":[]'  # the usage chunk; inside of a text its quotes would be escaped
LAST_CHUNK = b"0\r\n\r\n"
START_WITHIN_S = 60.0


@dataclass(slots=True)
class Reply:
    """What came of one request; times are `time.monotonic()`, 0 where there was nothing."""

    number: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    end_s: float = 0.0
    num_events: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between events with tokens
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All replies, and the processor seconds that each client process took for them."""

    replies: list[Reply]
    client_cpu_s: list[float]

    @property
    def wall_s(self) -> float:
        """From the first request to the last byte."""
        begin_s = min(reply.sent_s for reply in self.replies)
        return max(reply.end_s for reply in self.replies) - begin_s


class ClientError(Exception):
    """The clients did not come to an end."""


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """Render a POST of JSON on a connection that stays open."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def completion(model: str, ask: Ask) -> dict[str, Any]:
    """Return the body of a workload's request."""
    return {
        "model": model,
        "prompt": ask.prompt_ids,
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class StreamReader:
    """Reads one answer after the other out of a connection's bytes; knows no socket."""

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
        """Take bytes that came; True when the answer is over, well or with an error."""
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
        """Look at whole lines of a stream."""
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
        """End the answer that is waited for, if there is one."""
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

    def _fail(self, reply: Reply, said: bytes, now_s: float) -> bool:
        reply.error = said[:400].decode(errors="replace")
        reply.end_s = now_s
        self._reply = None
        return True


def _usage(lines: bytes) -> dict[str, Any]:
    begin = lines.rindex(EVENT, 0, lines.index(NO_CHOICES)) + len(EVENT)
    found = json.loads(lines[begin : lines.index(b"\n", begin)])["usage"]
    return dict(found)


class _Connection(asyncio.Protocol):
    """One stream's connection."""

    def __init__(self) -> None:
        self._reader = StreamReader()
        self._waiter: asyncio.Future[None] | None = None
        self.is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._reader.feed(data, time.monotonic()):
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._reader.lost(f"the connection was lost: {error}", time.monotonic())
        self._wake()

    async def ask(self, request: bytes, reply: Reply) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._reader.begin(reply)
        self._transport.write(request)
        await self._waiter
        if reply.error:
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _stream(port: int, requests: list[bytes], take: Callable[[], int]) -> list[Reply]:
    """Ask what `take` says until nothing is left; the first connect counts as waiting."""
    loop = asyncio.get_running_loop()
    replies: list[Reply] = []
    connection: _Connection | None = None
    while (number := take()) < len(requests):
        reply = Reply(number, time.monotonic())
        replies.append(reply)
        try:
            if connection is None or not connection.is_open:
                _, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
            await connection.ask(requests[number], reply)
        except OSError as error:
            reply.error = f"{type(error).__name__}: {error}"
            reply.end_s = time.monotonic()
    if connection is not None:
        connection.close()
    return replies


def _process(port: int, requests: list[bytes], streams: int, next_: Any, pipe: Connection) -> None:
    def take() -> int:
        with next_.get_lock():
            number = int(next_.value)
            next_.value += 1
        return number

    async def run() -> list[Reply]:
        found = await asyncio.gather(*(_stream(port, requests, take) for _ in range(streams)))
        return [reply for replies in found for reply in replies]

    gc.collect()
    gc.freeze()
    gc.disable()  # a run makes a few MB at most
    pipe.send("ready")
    pipe.recv()
    began_s = time.process_time()
    try:
        replies = uvloop.run(run())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((replies, time.process_time() - began_s))


class Clients:
    """Client processes that are ready to ask; `run` lets them go."""

    def __init__(
        self, port: int, requests: Sequence[bytes], num_streams: int, num_processes: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        next_ = context.Value("i", 0)
        count = max(1, min(num_processes, num_streams))
        self._members = []
        for number in range(count):
            share = num_streams // count + (number < num_streams % count)
            ours, theirs = context.Pipe()
            arguments = (port, list(requests), share, next_, theirs)
            process = context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for _, pipe in self._members:
            self._hear(pipe, time.monotonic() + START_WITHIN_S)

    def run(self, within_s: float) -> Outcome:
        """Ask everything and return what came; ClientError when it takes too long."""
        deadline_s = time.monotonic() + within_s
        try:
            for _, pipe in self._members:
                pipe.send("go")
            heard = [self._hear(pipe, deadline_s) for _, pipe in self._members]
        finally:
            self.close()
        replies = [reply for found, _ in heard for reply in found]
        return Outcome(replies, [cpu_s for _, cpu_s in heard])

    def close(self) -> None:
        """End all processes; those that have reported end by themselves."""
        for process, pipe in self._members:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join()

    @staticmethod
    def _hear(pipe: Connection, deadline_s: float) -> Any:
        try:
            if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
                raise ClientError("the clients did not end in time")
            said = pipe.recv()
        except (EOFError, OSError):
            raise ClientError("a client process died") from None
        if isinstance(said, str) and said != "ready":
            raise ClientError(said)
        return said
