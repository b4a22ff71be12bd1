"""What the ring itself costs, with a virtual device whose steps take no time.

    python -m benchmarks.ring [--streams 500] [--tokens 2000]

Throughput: tokens a second through one router to 500 streams, over a million tokens and then a
second million, during which no service may grow. The device is never the limit there, so tokens
that wait for the router leave several in an event; a third load is paced by the device, so that
every token can have an event of its own. Latency: the time from the end of a device step to the
client's event with its token, for one stream; the end comes from the server's timeline.
"""

from __future__ import annotations

import argparse
import statistics
import time
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import ended, event_times_s, run, streams
from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, rss_mib, scratch_folder
from services.bench.client import LoadResult
from services.timeline import fetch

SHAPE = ModelShape(vocab_size=4096, max_model_len=8192)
SAMPLE_S = 0.25
PACED_STEP_S = 0.0125  # with 500 streams that is 40,000 tokens a second
LATENCY_STEP_S = 0.01
LATENCY_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Round:
    """One load, and what the services used for it."""

    outcome: LoadResult
    num_tokens: int
    wall_s: float
    cpu_s: dict[str, float]
    peak_mib: dict[str, float]
    end_mib: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the whole time, from the first request to the last end."""
        return self.num_tokens / self.wall_s

    @property
    def num_events(self) -> int:
        """SSE events with tokens."""
        return sum(reply.num_events for reply in self.outcome.replies)

    @property
    def events_per_s(self) -> float:
        """SSE events over the same time."""
        return self.num_events / self.wall_s


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


def run_round(stack: Stack, num_streams: int, num_tokens: int) -> Round:
    """Run one load to its end and watch the services meanwhile."""
    pids = stack.pids()
    bodies = tuple(body(num_tokens, number) for number in range(num_streams))
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    peak_mib = dict.fromkeys(pids, 0.0)
    clients = streams(stack.port, bodies, num_streams)
    clients.start()
    while not clients.is_done:
        for name, pid in pids.items():
            peak_mib[name] = max(peak_mib[name], rss_mib(pid))
        time.sleep(SAMPLE_S)
    outcome = ended(clients)
    return Round(
        outcome,
        num_streams * num_tokens,
        outcome.wall_s,
        {name: cpu_s(pid) - before_s[name] for name, pid in pids.items()},
        peak_mib,
        {name: rss_mib(pid) for name, pid in pids.items()},
    )


def measure_throughput(
    folder: Path, num_streams: int, num_tokens: int, step_s: float, num_rounds: int
) -> list[Round]:
    """Run a load once to warm up, then the same so many times."""
    settings = {
        "compute.sim_step_base_s": step_s,
        "compute.max_num_seqs": num_streams,
        # The warm-up fills the pages, so that from then on pages are evicted as in a server.
        "compute.max_batched_token_mem": num_streams * (num_tokens + 64),
    }
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        run_round(stack, num_streams, num_tokens)
        return [run_round(stack, num_streams, num_tokens) for _ in range(num_rounds)]


def measure_latency(folder: Path, num_tokens: int) -> list[float]:
    """Return what the ring of a server adds to each token of one stream."""
    settings = {"compute.sim_step_base_s": LATENCY_STEP_S}
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        run_round(stack, 1, num_tokens // 4)
        return added_s(stack.port, num_tokens)


def added_s(port: int, num_tokens: int) -> list[float]:
    """Return the seconds from the end of a device step to the event with its token, for one stream.

    Server and client are on one host, so both read the same monotonic clock. An event belongs to
    the last step that ended before it: a step takes much longer than the ring.
    """
    (reply,) = run(streams(port, (body(num_tokens),), 1)).replies
    timeline = fetch(f"http://127.0.0.1:{port}", 2 * num_tokens * LATENCY_STEP_S)
    events_s = event_times_s(reply)
    (steps,) = (track for part in timeline.parts for track in part.tracks if track.lane == "device")
    ends_s = steps.ended_s
    return [event_s - ends_s[bisect(ends_s, event_s) - 1] for event_s in events_s[10:]]


def report_throughput(report: Report, rounds: list[Round], paced: Round) -> None:
    """Write the figures of the free rounds and of the paced one."""
    all_rounds = [*rounds, paced]
    report.text("## Throughput")
    report.table(
        ["", "free, 1st round", "free, 2nd round", f"steps of {PACED_STEP_S * 1e3:g} ms"],
        [
            ["tokens", *(each.num_tokens for each in all_rounds)],
            ["**tokens/s**", *(each.tokens_per_s for each in all_rounds)],
            ["SSE events/s", *(each.events_per_s for each in all_rounds)],
            [
                "events per token",
                *(round(each.num_events / each.num_tokens, 3) for each in all_rounds),
            ],
        ],
    )
    report.text(
        "Rates are from the first request to the last end, beginnings and ends included. Free: the "
        "device takes no time, and tokens that wait for the router share an event."
    )
    report.text("Processor time per token, user and system, and resident memory by process:")
    report.table(
        ["", "us, 1st", "us, 2nd", "us, paced", "MiB after 1st", "MiB after 2nd", "peak in 2nd"],
        [
            [
                name,
                *(round(1e6 * each.cpu_s[name] / each.num_tokens, 2) for each in rounds),
                round(1e6 * paced.cpu_s[name] / paced.num_tokens, 2),
                *(round(each.end_mib[name], 1) for each in rounds),
                round(rounds[-1].peak_mib[name], 1),
            ]
            for name in rounds[0].cpu_s
        ],
    )


def report_latency(report: Report, added_s: list[float]) -> None:
    """Write what one stream waits for the ring after each step."""
    report.text(
        "## Latency added per token, one stream\n\n"
        f"Steps of {LATENCY_STEP_S * 1e3:g} ms. From the end of a step on the device until the "
        "client has the event with its token: taking the result, commit, link, text, link, event, "
        "and the write. The processes sleep between tokens."
    )
    report.table(
        ["added by the ring, ms", "median", "p90", "p99"],
        [["one stream", *quantiles_ms(added_s)]],
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
        size = (arguments.streams, arguments.tokens)
        free = measure_throughput(folder, *size, 0.0, 2)
        (paced,) = measure_throughput(folder, *size, PACED_STEP_S, 1)
        report_throughput(report, free, paced)
        report_latency(report, measure_latency(folder, LATENCY_TOKENS))
    report.write()


if __name__ == "__main__":
    main()
