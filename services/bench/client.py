"""HTTP clients that note when tokens arrive, in processes of their own.

They parse as little of a stream as they can, and their processor time is measured, so that they do
not limit the figures unseen. All streams take their requests from one list.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import signal
import ssl
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

START_WITHIN_S = 60.0
WATCHED_EVERY_S = 0.1

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
    """Counts and times the events of one answer after the other, and parses only the usage."""

    def __init__(self) -> None:
        self._reply: Reply | None = None

    def begin(self, reply: Reply) -> None:
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
                return self._fail(reply, lines[:12] + b": " + lines[end + 4 :], now_s)
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


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All replies, and the processor seconds of each client process."""

    replies: list[Reply]
    client_cpu_s: list[float]

    @property
    def wall_s(self) -> float:
        """From the first request to the last byte."""
        begin_s = min(reply.sent_s for reply in self.replies)
        return max(reply.end_s for reply in self.replies) - begin_s


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where requests go; each gets `headers`, and `prefix` before its path."""

    host: str
    port: int
    secure: bool = False
    prefix: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the bytes of a JSON POST on a connection that stays open."""
        data = json.dumps(body).encode()
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests, as bytes; without arrivals, each stream sends one as soon as it is free."""

    requests: tuple[bytes, ...]
    num_streams: int
    arrivals_s: tuple[float, ...] = ()  # when requests are sent, however many are open


class ClientError(Exception):
    """The clients did not end as they should."""


class _Connection(asyncio.Protocol):
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


class _Client:
    """The streams of one process; all processes share the numbers `next_` and `done`."""

    def __init__(self, endpoint: ServerAddress, load: OfferedLoad, next_: Any, done: Any) -> None:
        self._endpoint = endpoint
        self._load = load
        self._next = next_
        self._done = done
        self._tls = ssl.create_default_context() if endpoint.secure else None
        self._idle: list[_Connection] = []
        self.replies: list[Reply] = []

    async def run(self, num_streams: int) -> None:
        """Keep this many streams open until no request is left."""
        await asyncio.gather(*(self._stream() for _ in range(num_streams)))
        self._close()

    async def run_at_times(self, number: int, num_processes: int) -> None:
        """Send this process's share of the requests when they are due."""
        began_s = time.monotonic()
        tasks = []
        times = list(enumerate(self._load.arrivals_s))
        for index, arrival_s in times[number::num_processes]:
            await asyncio.sleep(max(0.0, began_s + arrival_s - time.monotonic()))
            # If the client itself is late, that counts as waiting.
            tasks.append(asyncio.ensure_future(self._ask(index, began_s + arrival_s)))
        await asyncio.gather(*tasks)
        self._close()

    async def _stream(self) -> None:
        while (number := self._take()) < len(self._load.requests):
            await self._ask(number, time.monotonic())

    async def _ask(self, number: int, sent_s: float) -> None:
        reply = Reply(number, sent_s)
        self.replies.append(reply)
        try:
            connection = await self._connection()
            await connection.ask(self._load.requests[number], reply)
            if connection.is_open:
                self._idle.append(connection)
        except OSError as error:
            reply.error = f"{type(error).__name__}: {error}"
            reply.end_s = time.monotonic()
        with self._done.get_lock():
            self._done.value += 1

    async def _connection(self) -> _Connection:
        """Return an idle connection or open one, which counts as waiting."""
        while self._idle:
            idle = self._idle.pop()
            if idle.is_open:
                return idle
        loop = asyncio.get_running_loop()
        to = self._endpoint
        _, connection = await loop.create_connection(_Connection, to.host, to.port, ssl=self._tls)
        return connection

    def _take(self) -> int:
        with self._next.get_lock():
            number = int(self._next.value)
            self._next.value += 1
        return number

    def _close(self) -> None:
        for connection in self._idle:
            connection.close()


def _process(
    endpoint: ServerAddress,
    load: OfferedLoad,
    share: tuple[int, int, int],
    shared: Any,
    pipe: Connection,
) -> None:
    """Run one client process; `share` is its number, of how many, and its streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    number, count, num_streams = share
    client = _Client(endpoint, load, *shared)
    gc.collect()
    gc.freeze()
    gc.disable()  # a run makes a few MB at most
    pipe.send("ready")
    try:
        pipe.recv()
    except EOFError:  # nothing is to be measured after all
        return
    began_s = time.process_time()
    try:
        if load.arrivals_s:
            uvloop.run(client.run_at_times(number, count))
        else:
            uvloop.run(client.run(num_streams))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send((client.replies, time.process_time() - began_s))


class Clients:
    """Client processes that have started and wait; `run` lets them send."""

    def __init__(self, endpoint: ServerAddress, load: OfferedLoad, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept here: the memory of a shared value that is dropped is used for the next one.
        self._shared = (context.Value("i", 0), context.Value("i", 0))
        count = max(1, min(num_processes, load.num_streams))
        self._members = []
        for number in range(count):
            num_streams = load.num_streams // count + (number < load.num_streams % count)
            ours, theirs = context.Pipe()
            arguments = (endpoint, load, (number, count, num_streams), self._shared, theirs)
            process = context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for _, pipe in self._members:
            self._hear(pipe, time.monotonic() + START_WITHIN_S)

    @property
    def is_done(self) -> bool:
        """Whether all processes have reported or died."""
        return all(pipe.poll() or not process.is_alive() for process, pipe in self._members)

    def start(self) -> None:
        for _, pipe in self._members:
            pipe.send("go")

    def run(self, within_s: float, watch: Callable[[int], None] | None = None) -> LoadResult:
        """Send all requests, or raise ClientError; `watch` gets the number that have ended."""
        deadline_s = time.monotonic() + within_s
        self.start()
        while watch is not None and not self.is_done and time.monotonic() < deadline_s:
            watch(self._shared[1].value)
            time.sleep(WATCHED_EVERY_S)
        return self.outcome(max(0.0, deadline_s - time.monotonic()))

    def outcome(self, within_s: float) -> LoadResult:
        deadline_s = time.monotonic() + within_s
        try:
            reports = [self._hear(pipe, deadline_s) for _, pipe in self._members]
        finally:
            self.close()
        replies = [reply for own_replies, _ in reports for reply in own_replies]
        return LoadResult(replies, [cpu_s for _, cpu_s in reports])

    def close(self) -> None:
        """End the processes that have not ended by themselves."""
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
            report = pipe.recv()
        except (EOFError, OSError):
            raise ClientError("a client process died") from None
        if isinstance(report, str) and report != "ready":
            raise ClientError(report)
        return report
