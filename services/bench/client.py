"""HTTP clients that note when tokens arrive, in processes of their own.

They parse as little of a stream as they can, and their processor time is measured, so that they do
not limit the figures unseen. Streams take requests from one list, each as soon as it is free.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import signal
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from services.bench.stream_reader import Reply, StreamReader

START_WITHIN_S = 60.0
WATCHED_EVERY_S = 0.1


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
    """Requests, as bytes, and when they are sent.

    Each stream sends one as soon as it is free; or with `arrivals_s`, each request is sent at its
    time in seconds from the start, however many are open.
    """

    requests: tuple[bytes, ...]
    num_streams: int
    arrivals_s: tuple[float, ...] = ()


class ClientError(Exception):
    """The clients did not end as they should."""


class _Connection(asyncio.Protocol):
    """The connection of one stream."""

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
    """The streams of one process; `next_` and `done` are numbers that all processes share."""

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
    """Client processes that are ready to send; `run` starts them."""

    def __init__(self, endpoint: ServerAddress, load: OfferedLoad, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept here: the memory of a value whose maker has dropped it is used for the next one.
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
    def num_done(self) -> int:
        return int(self._shared[1].value)

    @property
    def is_done(self) -> bool:
        """Whether all processes have reported, or died."""
        return all(pipe.poll() or not process.is_alive() for process, pipe in self._members)

    def start(self) -> None:
        for _, pipe in self._members:
            pipe.send("go")

    def run(self, within_s: float, watch: Callable[[int], None] | None = None) -> LoadResult:
        """Send all requests and return the replies; ClientError if that takes too long.

        `watch` is called now and then with the number of requests that have ended.
        """
        deadline_s = time.monotonic() + within_s
        self.start()
        while watch is not None and not self.is_done and time.monotonic() < deadline_s:
            watch(self.num_done)
            time.sleep(WATCHED_EVERY_S)
        return self.outcome(max(0.0, deadline_s - time.monotonic()))

    def outcome(self, within_s: float) -> LoadResult:
        """Wait for the replies."""
        deadline_s = time.monotonic() + within_s
        try:
            reports = [self._hear(pipe, deadline_s) for _, pipe in self._members]
        finally:
            self.close()
        replies = [reply for own_replies, _ in reports for reply in own_replies]
        return LoadResult(replies, [cpu_s for _, cpu_s in reports])

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
            report = pipe.recv()
        except (EOFError, OSError):
            raise ClientError("a client process died") from None
        if isinstance(report, str) and report != "ready":
            raise ClientError(report)
        return report
