"""How long one client waits for its first token when the device takes no time: what the host costs.

    python -m benchmarks.first_token [--other CHECKOUT] [--requests 400]

One stream at a time over a connection that stays open, on the device `sim` with steps of no time,
so that all that is left is HTTP, the links, the codecs and five wakes of sleeping processes. With
`--other`, the server of another checkout runs beside this one's and the requests go to the two in
turn: both see the same noise of a shared machine, and only their ratio counts. Processor time is
that of a whole request with two tokens, of all threads of a service and its children.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, descendants_of, scratch_folder
from services.bench.client import Reply, ServerAddress, StreamReader

SHAPE = ModelShape(vocab_size=4096, max_model_len=8192)
PROMPT_TOKENS = 128
WARM_UP = 50
REST_S = 0.003  # after an answer: the processes sleep again, as between the requests of one user
WORDS = "the train leaves the station in the morning and comes back in the evening".split()
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions", "ids": "/v1/completions"}


def body(kind: str, number: int) -> dict[str, Any]:
    """A request for two tokens whose prompt no cache knows."""
    dice = random.Random(number)
    text = " ".join(dice.choices(WORDS, k=60))
    prompt: dict[str, Any] = {
        "text": {"prompt": text},
        "chat": {"messages": [{"role": "user", "content": text}]},
        "ids": {"prompt": dice.choices(range(300, 4096), k=PROMPT_TOKENS)},
    }[kind]
    return {"model": "sim", "max_tokens": 2, "stream": True, "ignore_eos": True, **prompt}


@dataclass(slots=True)
class Server:
    """One checkout's server, its open connection, and what was measured of it by kind of prompt."""

    name: str
    stack: Stack
    link: socket.socket
    first_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict)

    def ask(self, kind: str, number: int) -> float:
        """Send a request and read all of its answer; returns the seconds until its first event."""
        request = ServerAddress("127.0.0.1", self.stack.port).post(PATHS[kind], body(kind, number))
        reader, reply = StreamReader(), Reply(number, time.monotonic())
        reader.begin(reply)
        self.link.sendall(request)
        while not reader.feed(self.link.recv(1 << 16), time.monotonic()):
            pass
        if reply.error:
            raise RuntimeError(reply.error)
        return reply.first_s - reply.sent_s

    def used_s(self) -> dict[str, float]:
        """Return the processor seconds of each service since its start, children included."""
        return {
            name: sum(map(_thread_s, (pid, *descendants_of(pid))))
            for name, pid in self.stack.pids().items()
        }


def _thread_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, in nanoseconds' resolution."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


@contextlib.contextmanager
def serving(name: str, root: Path | None, folder: Path) -> Iterator[Server]:
    """Run the server of a checkout, of this one without a root."""
    settings = {"compute.sim_step_base_s": 0.0}
    with Stack(folder, "--device", "sim", settings=settings, root=root) as stack:
        with socket.create_connection(("127.0.0.1", stack.port)) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Server(name, stack, link)


def measure(servers: list[Server], kind: str, num_requests: int) -> None:
    """Send the requests to the servers in turn, in an order that changes."""
    for number in range(WARM_UP):
        for server in servers:
            server.ask(kind, -number)
    for server in servers:
        server.first_s[kind] = []
        server.cpu_s[kind] = server.used_s()
    for number in range(num_requests):
        for server in servers if number % 2 else reversed(servers):
            time.sleep(REST_S)
            server.first_s[kind].append(server.ask(kind, number))
    for server in servers:
        used_s = server.used_s()
        before_s = server.cpu_s[kind]
        server.cpu_s[kind] = {name: used_s[name] - before_s[name] for name in used_s}


def row(kind: str, server: Server, num_requests: int) -> list[object]:
    """One line of the table: first tokens in ms, processor time in us a request."""
    cuts = statistics.quantiles(server.first_s[kind], n=100)
    first_ms = [round(1e3 * cuts[at], 3) for at in (9, 49, 89)]
    used_us = [round(1e6 * used_s / num_requests) for used_s in server.cpu_s[kind].values()]
    return [f"{kind}, {server.name}", *first_ms, *used_us, sum(used_us)]


def ratios(kind: str, ours: Server, other: Server) -> list[object]:
    """How one line stands to another."""
    mine, theirs = row(kind, ours, 1)[1:], row(kind, other, 1)[1:]
    pairs = zip(mine, theirs, strict=True)
    return [f"**{kind}, ratio**", *(f"{float(a) / float(b):.2f}" for a, b in pairs)]  # type: ignore[arg-type]


def main() -> None:
    """Read the command line, measure, and print a page; results/first_token.md has several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout to take turns with")
    parser.add_argument("--requests", type=int, default=400, help="of each kind, to each server")
    parser.add_argument("--kinds", nargs="*", default=list(PATHS), choices=list(PATHS))
    arguments = parser.parse_args()
    report = Report(
        "first_token",
        "What the host adds to the first token",
        "One stream at a time, two tokens, and a device whose steps take no time.",
    )
    with contextlib.ExitStack() as stack:
        folder = save_folder(
            stack.enter_context(scratch_folder()) / "sim", SHAPE, with_weights=False
        )
        servers = [stack.enter_context(serving("this", None, folder))]
        if arguments.other:
            other = arguments.other.resolve()
            servers.append(stack.enter_context(serving("other", other, folder)))
        for kind in arguments.kinds:
            measure(servers, kind, arguments.requests)
        names = list(servers[0].stack.pids())
    rows = []
    for kind in arguments.kinds:
        rows += [row(kind, server, arguments.requests) for server in servers]
        if len(servers) > 1:
            rows.append(ratios(kind, *servers))
    report.text("Time to the first token in ms; processor time of a request in us:")
    columns = ["", "p10", "median", "p90", *(f"{name}, us" for name in names), "all, us"]
    report.table(columns, rows)
    print(report.page)


if __name__ == "__main__":
    main()
