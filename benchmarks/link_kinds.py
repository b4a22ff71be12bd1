"""What keys and the shortcut of a host cost: processor time and latency of a step, by kind of link.

    python -m benchmarks.link_kinds [--steps 2000] [--rows 100]

Two transports in one process send one step back and forth, so its processor time is that of sender,
receiver and ZeroMQ's threads together. The kinds take turns, several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from statistics import median
from typing import Any

import uvloop

from benchmarks.links import token_step
from benchmarks.report import Report
from common.config import LinkSettings
from common.link.curve import create_keys
from common.link.sockets import ZmqTransport
from common.messages.address import Address
from common.messages.tokens import DetokenizerInbox

ROUNDS = 7
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


def main() -> None:
    """Measure and write benchmarks/results/link_kinds.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind, results in found.items():
            results.append(uvloop.run(measure(kind, options.steps, options.rows)))
    report = Report("link_kinds", "Kinds of links", "What keys and the shortcut of one host cost.")
    report.text(
        f"One step of {options.rows} rows from one transport to another of the same process, back "
        f"and forth {options.steps:,} times; medians of {ROUNDS} rounds with the kinds in turn."
    )
    rows = []
    for kind, name in KINDS.items():
        cpu_us, time_us = (median(column) for column in zip(*found[kind], strict=True))
        rows.append((name, cpu_us, time_us, cpu_us / median(each[0] for each in found["ipc"])))
    report.table(("link", "processor time, µs", "time, µs", "of ipc"), rows)
    report.write()


if __name__ == "__main__":
    main()
