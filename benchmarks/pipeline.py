"""One step ahead against lockstep: what it gains that the device does not wait for the text.

    python -m benchmarks.pipeline [--requests 40] [--rounds 3]

The same code twice, on a virtual device: once planning a step ahead of the device, once made to
wait until the text of a step is written to the clients before it plans the next, as a serial
server does. 64 clients ask one request after the other, of 32 tokens each.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import middle_of, run, streams
from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder
from services.bench.client import Outcome

STEP_S = 0.005
NUM_STREAMS = 64
MAX_TOKENS = 32
WARMUP_SHARE = 0.15  # of the time, at either end, is left out


@dataclass(frozen=True, slots=True)
class Run:
    """One server's figures."""

    requests_per_s: float
    tokens_per_s: float
    median_ttft_s: float
    steps: int
    busy_s: float
    idle_s: float

    @property
    def idle_share(self) -> float:
        """The device's share of time without a step while there was work."""
        return self.idle_s / (self.busy_s + self.idle_s)


def measure(folder: Path, requests_per_stream: int, lockstep: bool) -> Run:
    """Start a server, load it, and end it for its account of the device's time."""
    settings = {
        "compute.sim_step_base_s": STEP_S,
        "compute.lockstep": str(lockstep).lower(),
        "compute.in_flight_steps": 1,
    }
    bodies = tuple(
        {
            "model": "sim",
            "prompt": f"Client {number} asks",
            "max_tokens": MAX_TOKENS,
            "seed": number,
            "stream": True,
            "ignore_eos": True,
        }
        for number in range(NUM_STREAMS)
    )
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        outcome = run(streams(stack.port, bodies, NUM_STREAMS, requests_per_stream))
        stack.stop()
        (stopped,) = stack.logged("engine stopped")
    per_s = steady_requests_per_s(outcome)
    return Run(
        per_s,
        per_s * MAX_TOKENS,
        statistics.median(reply.first_s - reply.sent_s for reply in outcome.replies),
        stopped["steps"],
        stopped["device_busy_s"],
        stopped["device_idle_s"],
    )


def steady_requests_per_s(outcome: Outcome) -> float:
    """Requests ended per second, without the beginning and the end of the run."""
    begin_s, end_s = middle_of(outcome, WARMUP_SHARE)
    count = sum(begin_s <= reply.end_s < end_s for reply in outcome.replies)
    return count / (end_s - begin_s)


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40, help="of each of the 64 clients")
    parser.add_argument("--rounds", type=int, default=3, help="of both servers, in turn")
    arguments = parser.parse_args()
    ahead, lockstep = [], []
    with scratch_folder() as scratch:
        folder = save_folder(scratch / "sim", ModelShape(vocab_size=4096), with_weights=False)
        for _ in range(arguments.rounds):
            lockstep.append(measure(folder, arguments.requests, lockstep=True))
            ahead.append(measure(folder, arguments.requests, lockstep=False))
    write_report(ahead, lockstep)


def write_report(ahead: list[Run], lockstep: list[Run]) -> None:
    """Write each round and the ratios of their medians."""
    report = Report(
        "pipeline",
        "One step ahead against lockstep",
        f"Targets: requests per second at least 1.2 times those of lockstep, with {NUM_STREAMS} "
        f"streams and a device step of {STEP_S * 1e3:g} ms, and the device idle for at most 2 % "
        "of the time between steps.",
    )
    report.table(
        ["", "requests/s", "tokens/s", "median TTFT ms", "steps", "device idle %"],
        [
            [
                f"{name}, round {number}",
                round(run.requests_per_s, 1),
                round(run.tokens_per_s),
                round(1e3 * run.median_ttft_s, 1),
                run.steps,
                round(100 * run.idle_share, 2),
            ]
            for name, runs in (("lockstep", lockstep), ("one step ahead", ahead))
            for number, run in enumerate(runs, 1)
        ],
    )
    ratios = [
        first.requests_per_s / second.requests_per_s
        for first, second in zip(ahead, lockstep, strict=True)
    ]
    idle = statistics.median(run.idle_share for run in ahead)
    ceiling = NUM_STREAMS / (MAX_TOKENS * STEP_S)
    report.text(
        f"Ratio of requests/s: {statistics.median(ratios):.3f} (median; by round: "
        f"{', '.join(f'{ratio:.3f}' for ratio in ratios)}). Device idle between steps, one step "
        f"ahead: {100 * idle:.2f} % (median). A device that never waits, with a request's prompt "
        f"computed in the step of its first token, would end {ceiling:.1f} requests/s."
    )
    report.write()


if __name__ == "__main__":
    main()
