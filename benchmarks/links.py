"""What the links cost: messages and tokens a second from one process to another, and the codec.

    python -m benchmarks.links [--messages 200000] [--steps 5000] [--rows 256]

The same bytes go through raw pyzmq (blocking, one frame), through `zmq.asyncio`, and through
`ZmqTransport` with all that it does: encode, budgets, decode, validation, delivery. Sender and
receiver are processes of their own; what counts is the receiver's clock from the first to the last
message. The sender stays until all has come: libzmq throws away what a full inbox has not read yet
when its sender hangs up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from benchmarks.report import Report
from common.config import LinkSettings
from common.link.codec import Codec
from common.link.sockets import ZmqTransport
from common.messages.address import Address, AttemptId
from common.messages.control import Abort
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokens import DetokenizerInbox, TokensGenerated

HIGH_WATER_MARK = 1000
TURN = 64  # messages that a ZmqTransport sender makes in one turn of its loop
ROUNDS = 5
NOBODY = Address("ipc:///run/slipstream/nobody.sock", "0" * 16)


def abort_frame(to: Address = NOBODY) -> bytes:
    """The head of an Abort, which is all of it."""
    return Codec(DetokenizerInbox).encode(Abort(AttemptId("r" * 16, 1), "lost"), to, NOBODY)[0]


def token_step(index: int, num_rows: int) -> TokensGenerated:
    """One step of a full batch: a token for each attempt."""
    builder = TokensGenerated(index)
    for counter in range(num_rows):
        builder.add(AttemptId("r" * 16, counter), index, (1000 + counter,))
    return builder


def text_step(index: int, num_rows: int) -> TextGenerated:
    """The text of one step of a full batch."""
    builder = TextGenerated()
    for counter in range(num_rows):
        builder.add(counter, index, (1000 + counter,), " hello")
    return builder


# --- the sending process


def send_raw(to: Address, num_messages: int) -> None:
    """Send single frames as fast as pyzmq does."""
    frame = abort_frame(to)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.sndhwm = HIGH_WATER_MARK
        socket.connect(to.endpoint)
        for _ in range(num_messages):
            socket.send(frame)
        sys.stdin.read()


async def send_messages(to: Address, run_dir: str, message: Any, num_messages: int) -> None:
    """Send through ZmqTransport, some in each turn of the loop, as fast as it takes them."""
    transport = ZmqTransport(
        LinkSettings(run_dir=run_dir), f"sender-{os.getpid()}", DetokenizerInbox
    )
    transport.open(lambda message, sender: None, lambda peer: None)
    for number in range(num_messages):
        transport.send(to, message)
        if number % TURN == 0:
            await asyncio.sleep(0)
            while transport.stats().num_waiting:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.0002)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close(0.0)


def sender(arguments: list[str]) -> None:
    """Be the sending process."""
    kind, endpoint, instance_id, run_dir, num_messages, num_rows = arguments
    to = Address(endpoint, instance_id)
    if kind in ("raw", "fed"):
        send_raw(to, int(num_messages))
        return
    steps = kind == "steps"
    message = token_step(0, int(num_rows)) if steps else Abort(AttemptId("r" * 16, 1), "lost")
    uvloop.run(send_messages(to, run_dir, message, int(num_messages)))


def start_sender(kind: str, to: Address, run_dir: str, *numbers: int) -> subprocess.Popen[bytes]:
    """Start the sending process."""
    command = [sys.executable, "-m", "benchmarks.links", "--sender", kind, to.endpoint]
    command += [to.instance_id or "-", run_dir, *map(str, numbers)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


# --- the receiving process


def receive_raw(run_dir: str, num_messages: int) -> float:
    """Return messages a second of a blocking receiver."""
    endpoint = f"ipc://{run_dir}/raw.sock"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvhwm = HIGH_WATER_MARK
        socket.bind(endpoint)
        child = start_sender("raw", Address(endpoint, ""), run_dir, num_messages, 0)
        socket.recv()
        begin_s = time.perf_counter()
        for _ in range(num_messages - 1):
            socket.recv()
        elapsed_s = time.perf_counter() - begin_s
    child.communicate()
    return num_messages / elapsed_s


async def receive_asyncio(run_dir: str, num_messages: int) -> float:
    """Return messages a second of a `zmq.asyncio` receiver."""
    endpoint = f"ipc://{run_dir}/asyncio.sock"
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvhwm = HIGH_WATER_MARK
        socket.bind(endpoint)
        child = start_sender("raw", Address(endpoint, ""), run_dir, num_messages, 0)
        await socket.recv()
        begin_s = time.perf_counter()
        for _ in range(num_messages - 1):
            await socket.recv()
        elapsed_s = time.perf_counter() - begin_s
    await asyncio.get_running_loop().run_in_executor(None, child.communicate)
    return num_messages / elapsed_s


async def receive_messages(kind: str, run_dir: str, num_messages: int, num_rows: int) -> float:
    """Return messages a second of ZmqTransport."""
    transport = ZmqTransport(LinkSettings(run_dir=run_dir), f"receiver-{kind}", DetokenizerInbox)
    num_units = begin_s = 0.0
    done = asyncio.Event()

    def deliver(message: Any, _: Address) -> None:
        nonlocal num_units, begin_s
        begin_s = begin_s or time.perf_counter()
        # What waited was merged, so tokens are counted, not messages.
        num_units += len(message.token_ids) / num_rows if num_rows else 1
        if num_units >= num_messages:
            done.set()

    transport.open(deliver, lambda peer: None)
    child = start_sender(kind, transport.address, run_dir, num_messages, num_rows)
    await done.wait()
    elapsed_s = time.perf_counter() - begin_s
    await asyncio.get_running_loop().run_in_executor(None, child.communicate)
    await transport.close(0.0)
    return num_messages / elapsed_s


# --- codec


def microseconds(call: Callable[[], object], number: int = 300) -> float:
    """Return the best of five rounds."""
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def codec_rows(num_rows: int) -> list[tuple[str, float]]:
    """Return what the parts of one hop cost for a full batch."""
    tokens, later = token_step(0, num_rows), token_step(1, num_rows)
    texts, later_texts = text_step(0, num_rows), text_step(1, num_rows)
    detokenizer, router = Codec(DetokenizerInbox), Codec(RouterInbox)
    token_frames = detokenizer.encode(tokens, NOBODY, NOBODY)
    text_frames = router.encode(texts, NOBODY, NOBODY)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("TokensGenerated: build from rows", lambda: token_step(0, num_rows)),
        ("TokensGenerated: encode", lambda: detokenizer.encode(tokens, NOBODY, NOBODY)),
        ("TokensGenerated: decode and check", lambda: detokenizer.decode(token_frames)),
        ("TokensGenerated: iterate rows", lambda: list(tokens.rows())),
        ("TokensGenerated: merge two", lambda: tokens.merged(later)),
        ("TextGenerated: build from rows", lambda: text_step(0, num_rows)),
        ("TextGenerated: encode", lambda: router.encode(texts, NOBODY, NOBODY)),
        ("TextGenerated: decode and check", lambda: router.decode(text_frames)),
        ("TextGenerated: merge two", lambda: texts.merged(later_texts)),
    ]
    return [(name, microseconds(call)) for name, call in cases]


def measure(num_messages: int, num_steps: int, num_rows: int) -> dict[str, list[float]]:
    """Return messages a second of each kind, the kinds in turn, several rounds."""
    found: dict[str, list[float]] = {
        "raw": [],
        "asyncio": [],
        "fed": [],
        "messages": [],
        "steps": [],
    }
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="links-") as run_dir:
            found["raw"].append(receive_raw(run_dir, num_messages))
            found["asyncio"].append(uvloop.run(receive_asyncio(run_dir, num_messages)))
            found["fed"].append(uvloop.run(receive_messages("fed", run_dir, num_messages, 0)))
            found["messages"].append(
                uvloop.run(receive_messages("messages", run_dir, num_messages, 0))
            )
            found["steps"].append(
                uvloop.run(receive_messages("steps", run_dir, num_steps, num_rows))
            )
    return found


def main() -> None:
    """Measure and write benchmarks/results/links.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--sender", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sender:
        sender(arguments.sender)
        return
    found = measure(arguments.messages, arguments.steps, arguments.rows)
    best = {kind: max(rates) for kind, rates in found.items()}
    median = {kind: sorted(rates)[len(rates) // 2] for kind, rates in found.items()}
    report = Report("links", "Links", "Messages from one process to another over ipc.")
    report.text(
        f"Messages a second; an Abort of {len(abort_frame())} bytes, {arguments.messages:,} of "
        f"them, {ROUNDS} rounds with the kinds in turn. The last column is against raw pyzmq in "
        "the same run, by medians."
    )
    names = {
        "raw": "raw pyzmq, blocking, nothing decoded",
        "asyncio": "zmq.asyncio, nothing decoded",
        "fed": "raw pyzmq to ZmqTransport, validated, delivered",
        "messages": "ZmqTransport to ZmqTransport, encoded, validated, delivered",
    }
    report.table(
        ("link", "median", "best", "of raw"),
        [
            (name, median[kind], best[kind], median[kind] / median["raw"])
            for kind, name in names.items()
        ],
    )
    report.text(
        f"Steps of {arguments.rows} rows, ZmqTransport: {median['steps']:,.0f} steps, so "
        f"{median['steps'] * arguments.rows:,.0f} tokens a second (median)."
    )
    report.text(f"One message of {arguments.rows} rows, microseconds, best of five:")
    report.table(("what", "µs"), codec_rows(arguments.rows))
    report.write()


if __name__ == "__main__":
    main()
