"""CPU time of the router per streamed token: inbox decode, in-flight table, SSE bytes, write.

Five hundred clients of another process stream over loopback; messages come encoded, as off a
socket. Reports microseconds of the router process's CPU time per token, kernel time included, and
beside it what bare writes of as many bytes cost on the same machine.

    python -m benchmarks.router_egress [--streams 500] [--steps 400] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import cast

import structlog
import uvloop

from benchmarks.report import Report
from common.link.codec import Codec
from common.messages.address import Address
from common.messages.arrays import int64s
from common.messages.control import (
    Load,
    ModelCard,
    ServiceName,
    WorkerAlive,
)
from common.messages.failure import Ending, Usage
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokenize import Tokenize, TokenizerInbox
from services.router.actor import RouterActor
from services.router.config import RouterSettings
from tests.memory_link import Exchange, MemoryTransport

SERVICES: tuple[ServiceName, ...] = ("tokenizer", "compute", "detokenizer")
PIECES = (" the", " a", "ing", " of", " station", ".", " 東京", " said")
REQUEST = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "max_tokens": 1000,
}


def client(port: int, num_streams: int, report: Connection) -> None:
    """Open the streams, drain them, and report the events that came."""
    body = json.dumps(REQUEST).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def one() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        num_events = num_bytes = 0
        tail = b""
        while True:
            data = await reader.read(1 << 16)
            num_bytes += len(data)
            data = tail + data
            num_events += data.count(b"\ndata: ")
            tail = data[-6:] if not data.endswith(b"\n") else data[-1:]
            if b"[DONE]" in data[-64:] or not data:
                writer.close()
                return num_events, num_bytes

    async def everything() -> None:
        results = await asyncio.gather(*(one() for _ in range(num_streams)))
        report.send([sum(column) for column in zip(*results, strict=True)])

    uvloop.run(everything())


def alive(service: ServiceName, address: Address) -> WorkerAlive:
    """Make a heartbeat that registers a worker for the whole run."""
    return WorkerAlive(
        service=service,
        address=address,
        model=ModelCard("demo", "rev1", 1000, 2048, 2047, 2047),
        load=Load(0, 0, 1024),
        beat=1,
        progress=1,
        stall_after_s=3600.0,
        draining=False,
        open_counters=int64s(),
    )


def encoded_steps(
    transport: MemoryTransport, sender: Address, counters: list[int], num_steps: int
) -> list[list[bytes]]:
    """Encode one message a step, with a token of every stream; the last one ends them all."""
    codec = Codec(RouterInbox)
    frames = []
    for step in range(num_steps):
        rows = TextGenerated()
        for counter in counters:
            rows.add(counter, step, [step], PIECES[(counter + step) % len(PIECES)])
            if step == num_steps - 1:
                rows.end(Ending("length", Usage(5, 0, num_steps)))
        frames.append(codec.encode(rows, transport.address, sender))
    return frames


async def measure(num_streams: int, num_steps: int) -> dict[str, float]:
    """Stream through the router and count its CPU time."""
    exchange = Exchange(auto=True)
    transport = exchange.transport("router", RouterInbox)
    actor = RouterActor(RouterSettings(port=0, max_in_flight=num_streams))
    await actor.start(transport)
    transport.open(actor.receive, actor.peer_lost)
    counters: list[int] = []
    all_asked = asyncio.Event()

    def asked(message: object, _: Address) -> None:
        if isinstance(message, Tokenize):
            counters.append(message.attempt.counter)
            if len(counters) == num_streams:
                all_asked.set()

    for service in SERVICES:
        worker = exchange.transport(service, TokenizerInbox)
        worker.open(asked, lambda peer: None)
        worker.send(transport.address, alive(service, worker.address))
    with clients(actor.port, num_streams) as report:
        await all_asked.wait()
        frames = encoded_steps(transport, worker.address, counters, num_steps)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for step in frames:
            transport.receive(step)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        num_events, num_bytes = await asyncio.to_thread(report.recv)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    await actor.stop()
    tokens = num_streams * num_steps
    return {
        "streams": num_streams,
        "tokens": tokens,
        "cpu_us_per_token": round(cpu_s / tokens * 1e6, 2),
        "tokens_per_s": round(tokens / wall_s),
        "events_per_token": round(num_events / tokens, 3),
        "bytes_per_token": round(num_bytes / tokens, 1),
    }


async def measure_bare(num_streams: int, num_steps: int, num_bytes: int) -> dict[str, float]:
    """Write as many bytes as often to as many sockets and do nothing else: what is the kernel's."""
    transports: list[asyncio.Transport] = []
    all_here = asyncio.Event()

    class Bare(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast(asyncio.Transport, transport))
            if len(transports) == num_streams:
                all_here.set()

    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    data = b"x" * num_bytes
    with clients(server.sockets[0].getsockname()[1], num_streams) as report:
        await all_here.wait()
        cpu_s = time.process_time()
        for _ in range(num_steps):
            for transport in transports:
                transport.write(data)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for transport in transports:
            transport.write(b"[DONE]")
        await asyncio.to_thread(report.recv)
        cpu_s = time.process_time() - cpu_s
    server.close()
    return {"bare_write_cpu_us": round(cpu_s / (num_streams * num_steps) * 1e6, 2)}


@contextlib.contextmanager
def clients(port: int, num_streams: int) -> Iterator[Connection]:
    """Run the clients in a process of their own; yields where their report will come."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=client, args=(port, num_streams, theirs)
    )
    process.start()
    try:
        yield ours
    finally:
        process.join()


def main() -> None:
    """Read the command line, run the rounds, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    report = Report(
        "router_egress",
        "What a streamed token costs the router",
        "Processor time, the kernel's included, from the message to the client's socket: decode, "
        "in-flight table, event, write. Beside it, what bare writes of as many bytes to as many "
        "sockets cost in the same round.",
    )
    rows = []
    for number in range(1, arguments.rounds + 1):
        figures = uvloop.run(measure(arguments.streams, arguments.steps))
        num_bytes = round(figures["bytes_per_token"])
        figures |= uvloop.run(measure_bare(arguments.streams, arguments.steps, num_bytes))
        own = figures["cpu_us_per_token"] - figures["bare_write_cpu_us"]
        rows.append(
            (
                f"round {number}",
                figures["cpu_us_per_token"],
                figures["bare_write_cpu_us"],
                round(own, 2),
                int(figures["tokens_per_s"]),
                figures["events_per_token"],
            )
        )
    report.text(f"{arguments.streams} streams, {arguments.steps} tokens each.")
    report.table(("", "µs/token", "µs/bare write", "difference", "tokens/s", "events/token"), rows)
    report.write()


if __name__ == "__main__":
    main()
