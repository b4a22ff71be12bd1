"""What keys and the shortcut of a host cost: processor time and latency of a step, by kind of link.

    python -m benchmarks.link_kinds [--steps 2000] [--rows 100] [--pairs 40]

Two transports in one process send one step back and forth, so its processor time is that of sender,
receiver and ZeroMQ's threads together. The kinds take turns, several rounds. Then short streams by
turns at two whole rings: one on ipc, which the launcher starts, and one on tcp with CURVE keys,
which needs root and `ip`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import uvloop

from benchmarks import ring
from benchmarks.hosts import Hosts, why_not
from benchmarks.links import token_step
from benchmarks.model_folders import save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, scratch_folder
from common.config import SERVICE_TABLES, LinkSettings
from common.link.curve import create_keys
from common.link.sockets import ZmqTransport
from common.messages.address import Address
from common.messages.tokens import DetokenizerInbox

ROUNDS = 7
TOKENS = 100  # of a stream
KINDS = {
    "ipc": "ipc",
    "curve": "tcp with CURVE, as between nodes",
    "shortcut": "tcp with CURVE that takes the shortcut of `local_dir`, as on one node",
}


def settings_of(kind: str, folder: str) -> LinkSettings:
    if kind == "ipc":
        return LinkSettings.model_validate({"run_dir": folder})
    links = {"bind": "tcp://127.0.0.1:0", "run_dir": folder, "curve_dir": f"{folder}/keys"}
    if kind == "shortcut":
        links["local_dir"] = f"{folder}/local"
    return LinkSettings.model_validate(links)


async def measure(kind: str, num_steps: int, num_rows: int) -> tuple[float, float]:
    """Return microseconds of processor time, and of time, that one step takes one way."""
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        create_keys(f"{folder}/keys")
        settings = settings_of(kind, folder)
        one = ZmqTransport(settings, "compute-0", DetokenizerInbox)
        other = ZmqTransport(settings, "detokenizer-0", DetokenizerInbox)
        message, done, left = token_step(0, num_rows), asyncio.Event(), num_steps
        began_s = (0.0, 0.0)

        def pass_on(transport: ZmqTransport, to: Address) -> Any:
            def deliver(_message: Any, _sender: Address) -> None:
                nonlocal left, began_s
                left -= 1
                if left == num_steps - 10:  # the link is open, and warm
                    began_s = (time.process_time(), time.perf_counter())
                if left:
                    transport.send(to, message)
                else:
                    done.set()

            return deliver

        one.open(pass_on(one, other.address), lambda peer: None)
        other.open(pass_on(other, one.address), lambda peer: None)
        one.send(other.address, message)
        await done.wait()
        elapsed = (time.process_time() - began_s[0], time.perf_counter() - began_s[1])
        await asyncio.gather(one.close(0.0), other.close(0.0))
    return elapsed[0] / (num_steps - 10) * 1e6, elapsed[1] / (num_steps - 10) * 1e6


def report_steps(report: Report, num_rows: int, num_steps: int) -> None:
    """Measure and write what one step costs by kind of link, the kinds in turn."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, results in found.items():
            results.append(uvloop.run(measure(kind, num_steps, num_rows)))
    report.text(f"## One way, tokens in a step: {num_rows}")
    rows = []
    for kind, name in KINDS.items():
        cpu_us, time_us = (median(column) for column in zip(*found[kind], strict=True))
        rows.append((name, cpu_us, time_us, cpu_us / median(each[0] for each in found["ipc"])))
    report.table(("link", "processor time, µs", "time, µs", "processor time of ipc's"), rows)


class Token(NamedTuple):
    """What a token of one stream took of a whole ring, in milliseconds."""

    added_ms: float
    cpu_ms: float


def token_of(port: int, pids: Iterable[int]) -> Token:
    """Run one short stream."""
    pids = list(pids)
    before_s = sum(map(cpu_s, pids))
    added_s = ring.added_s(port, TOKENS)
    return Token(1e3 * median(added_s), 1e3 * (sum(map(cpu_s, pids)) - before_s) / TOKENS)


def ring_pairs(folder: Path, num_pairs: int) -> Iterator[tuple[Token, Token]]:
    """Yield what a token takes of a ring on ipc, and of one on tcp with keys right after it."""
    settings = {"compute.device": "sim", "compute.sim_step_base_s": ring.LATENCY_STEP_S}
    layout = {"host": [f"{service}-0" for service in SERVICE_TABLES]}
    with (
        Stack(folder, "--device", "sim", settings=settings) as near,
        Hosts(folder, layout, settings) as far,
    ):
        pids = {near.port: [*near.pids().values()]}
        pids[far.port] = [each.pid for each in far.instances.values()]
        for number in range(num_pairs + 1):
            order = (near.port, far.port) if number % 2 else (far.port, near.port)
            found = {port: token_of(port, pids[port]) for port in order}
            if number:  # the first one warms up
                yield found[near.port], found[far.port]


def report_ring(report: Report, pairs: list[tuple[Token, Token]]) -> None:
    """Write what a token took, and what CURVE adds within a pair."""
    report.text(
        f"## A token of one stream, round the whole ring\n\n{len(pairs)} pairs of streams of "
        f"{TOKENS} tokens, with steps of {ring.LATENCY_STEP_S * 1e3:g} ms. Added: from the end of "
        "the step to the client's event. Processor time: of all four services, with their "
        "heartbeats. Both rings are on this machine; what a wire takes comes on top."
    )
    # Of processor time, which is counted in hundredths of a second, the mean.
    rows: list[tuple[object, ...]] = []
    for title, place, middle in (("added, ms", 0, median), ("processor time, ms", 1, fmean)):
        near, far = ([pair[kind][place] for pair in pairs] for kind in (0, 1))
        difference = [theirs - ours for ours, theirs in zip(near, far, strict=True)]
        low, _, high = quantiles(difference, n=4)
        spread = f"{middle(difference):.3f} ({low:.3f} to {high:.3f})"
        ratio = middle(far) / middle(near)
        rows.append((title, round(middle(near), 3), round(middle(far), 3), spread, ratio))
    columns = ("a token", "ipc", "tcp, CURVE", "difference in a pair (quartiles)", "ratio")
    report.table(columns, rows)


def main() -> None:
    """Measure and write benchmarks/results/link_kinds.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=40, help="of streams at two rings")
    options = parser.parse_args()
    report = Report("link_kinds", "Kinds of links", "What keys and the shortcut of one host cost.")
    report.text(
        "One step goes from one transport to another of the same process, back and forth "
        f"{options.steps:,} times; medians of {ROUNDS} rounds with the kinds in turn."
    )
    for num_rows in (1, options.rows):
        report_steps(report, num_rows, options.steps)
    if reason := why_not():
        report.text(f"Whole rings were not measured: {reason}.")
    else:
        with scratch_folder() as scratch:
            folder = save_folder(scratch / "sim", ring.SHAPE, with_weights=False)
            report_ring(report, list(ring_pairs(folder, options.pairs)))
    report.write()


if __name__ == "__main__":
    main()
