"""What the ring itself costs, with a virtual device whose steps take no time.

    python -m benchmarks.ring [--streams 500] [--tokens 2000]

Throughput: tokens a second as SSE events through one router, over a million tokens and then a
second million, during which no service may grow. Latency: one stream in lockstep, where a step
begins when the router has written the text of the one before, so that a period is the device's
time and one whole turn of the ring.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Load, Outcome, Running
from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, rss_mib, scratch_folder

SHAPE = ModelShape(vocab_size=4096, max_model_len=8192)
SAMPLE_S = 0.25
LATENCY_STEP_S = 0.002
LATENCY_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Round:
    """One load, and what the services used for it."""

    outcome: Outcome
    num_tokens: int
    wall_s: float
    cpu_s: dict[str, float]
    peak_mib: dict[str, float]
    end_mib: dict[str, float]

    @property
    def steady_per_s(self) -> float:
        """Events a second while all streams ran."""
        return self.outcome.events_per_s(*self.outcome.all_streaming)


def body(max_tokens: int, number: int = 0) -> dict[str, object]:
    """One request for exactly so many tokens."""
    return {
        "model": "sim",
        "prompt": f"Stream {number} of the ring",
        "max_tokens": max_tokens,
        "seed": number,
        "stream": True,
        "ignore_eos": True,
    }


def run_round(stack: Stack, num_streams: int, num_tokens: int, keep_times: bool = False) -> Round:
    """Run one load to its end and watch the services meanwhile."""
    pids = stack.pids()
    bodies = tuple(body(num_tokens, number) for number in range(num_streams))
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    peak_mib = dict.fromkeys(pids, 0.0)
    load = Load(stack.port, bodies, num_streams, keep_times=keep_times)
    running = Running(load, min(2, num_streams))
    while not running.is_done():
        for name, pid in pids.items():
            peak_mib[name] = max(peak_mib[name], rss_mib(pid))
        time.sleep(SAMPLE_S)
    outcome = running.outcome()
    return Round(
        outcome,
        num_streams * num_tokens,
        max(end for *_, end in outcome.requests) - min(sent for sent, *_ in outcome.requests),
        {name: cpu_s(pid) - before_s[name] for name, pid in pids.items()},
        peak_mib,
        {name: rss_mib(pid) for name, pid in pids.items()},
    )


def measure_throughput(folder: Path, num_streams: int, num_tokens: int) -> list[Round]:
    """Warm up, then run the same load twice."""
    settings = {
        "compute.sim_step_base_s": 0,
        "compute.max_num_seqs": num_streams,
        # The first round fills the pages, so that the second has to evict as a server does.
        "compute.max_batched_token_mem": num_streams * (num_tokens + 64),
    }
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        run_round(stack, num_streams, max(2, num_tokens // 20))
        return [run_round(stack, num_streams, num_tokens) for _ in range(2)]


def measure_latency(folder: Path, settings: Mapping[str, object], num_tokens: int) -> list[float]:
    """Return the seconds between one stream's events, the first few left out."""
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        run_round(stack, 1, num_tokens // 4)
        (times,) = run_round(stack, 1, num_tokens, keep_times=True).outcome.event_times
    return [later - earlier for earlier, later in zip(times[10:], times[11:], strict=False)]


def report_throughput(report: Report, rounds: list[Round]) -> None:
    """Write the figures of both rounds."""
    report.text("## Throughput")
    report.table(
        ["", "first round", "second round"],
        [
            ["tokens", *(each.num_tokens for each in rounds)],
            ["SSE events", *(each.outcome.num_events for each in rounds)],
            ["SSE events/s while all streams ran", *(each.steady_per_s for each in rounds)],
            ["tokens/s from first request to last end", *(tokens_per_s(each) for each in rounds)],
        ],
    )
    report.text("Processor time per token, and memory (resident, MiB) by process:")
    report.table(
        ["", "us/token, 1st", "us/token, 2nd", "MiB after 1st", "MiB after 2nd", "peak in 2nd"],
        [
            [
                name,
                *(round(1e6 * each.cpu_s[name] / each.num_tokens, 2) for each in rounds),
                *(round(each.end_mib[name], 1) for each in rounds),
                round(rounds[1].peak_mib[name], 1),
            ]
            for name in rounds[0].cpu_s
        ],
    )


def tokens_per_s(each: Round) -> float:
    """Tokens of the whole round over its whole time, beginnings and ends included."""
    return each.num_tokens / each.wall_s


def report_latency(report: Report, lockstep: list[float], ahead: list[float]) -> None:
    """Write what one stream waits for the ring."""
    added = [period_s - LATENCY_STEP_S for period_s in lockstep]
    report.text(
        "## Latency added per token, one stream\n\n"
        f"Steps of {LATENCY_STEP_S * 1e3:g} ms. In lockstep a step begins when the router has "
        "written the text of the one before and compute has heard of it, so a period is the "
        "step, all of the ring's work on a token, and a hop back that a server does not have: "
        "what is over the step's time bounds the added latency from above. One step ahead, the "
        "periods show how evenly the tokens come."
    )
    report.table(
        ["ms", "median", "p90", "p99"],
        [
            ["added by the ring (lockstep period - step)", *quantiles_ms(added)],
            ["period, lockstep", *quantiles_ms(lockstep)],
            ["period, one step ahead", *quantiles_ms(ahead)],
        ],
    )


def quantiles_ms(values_s: list[float]) -> list[float]:
    """Return median, p90 and p99 in milliseconds."""
    cuts = statistics.quantiles(values_s, n=100)
    return [round(1e3 * cuts[at], 3) for at in (49, 89, 98)]


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    arguments = parser.parse_args()
    report = Report(
        "ring",
        "What the ring costs",
        "Targets: 30,000 tokens a second or more as SSE events through one router with 500 "
        "streams, memory flat over a million tokens, and 1 ms or less added per token at the "
        "median of one stream.",
    )
    with scratch_folder() as scratch:
        folder = save_folder(scratch / "sim", SHAPE, with_weights=False)
        report_throughput(report, measure_throughput(folder, arguments.streams, arguments.tokens))
        step = {"compute.sim_step_base_s": LATENCY_STEP_S}
        lockstep = measure_latency(folder, step | {"compute.lockstep": "true"}, LATENCY_TOKENS)
        ahead = measure_latency(folder, step, LATENCY_TOKENS)
        report_latency(report, lockstep, ahead)
    report.write()


if __name__ == "__main__":
    main()
