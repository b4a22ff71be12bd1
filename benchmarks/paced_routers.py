"""How many tokens do one and two routers carry, each as it is made?

    python -m benchmarks.paced_routers [--routers 1,2] [--computes 4] [--most 16000]

`scale_out` presses a router with tokens of a device that takes no time. Such a router always finds
several tokens of a stream at once, which it writes as one event: that is cheap, and late. Here
computes keep the pace of a device (a step takes 20 ms) and the number of streams grows, until one
of a hundred events comes more than a step late, or tokens no longer have an event each. What came
of the last number of streams that went well is what the routers carry.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ring
from benchmarks.load import ended
from benchmarks.model_folders import save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, scratch_folder
from services.bench.client import Clients, OfferedLoad, ServerAddress

STEP_S = 0.02
TOKENS = 250  # of a stream: 5 s
LATE_S = 2 * STEP_S
APART = 0.98  # of all tokens have an event of their own
FINENESS = 16  # of the number of streams that is found


@dataclass(frozen=True, slots=True)
class Level:
    """What came of so many streams."""

    num_streams: int
    tokens_per_s: float
    events_per_token: float
    gap_p99_s: float
    router_cores: tuple[float, ...]
    client_cores: float  # of the busiest

    @property
    def went_well(self) -> bool:
        return self.gap_p99_s <= LATE_S and self.events_per_token >= APART


def highest(measure: Callable[[int], Level], first: int, most: int) -> Level | None:
    """Double the streams until they are too many, then halve the step up to a FINENESS-th."""
    best: Level | None = None
    good, bad = 0, most + 1
    count = first
    while count <= most and count < bad:
        level = measure(count)
        if level.went_well:
            best, good = level, count
        else:
            bad = count
        count = 2 * count if bad > most else (good + bad) // 2
        if bad <= most and bad - good <= max(1, bad // FINENESS):
            break
    return best


def measure(stack: Stack, num_streams: int, num_clients: int) -> Level:
    """Let so many streams run at once."""
    server = ServerAddress("127.0.0.1", stack.port)
    requests = tuple(
        server.post("/v1/completions", ring.body(TOKENS, n)) for n in range(num_streams)
    )
    clients = Clients(server, OfferedLoad(requests, num_streams), num_clients)
    pids = stack.pids("router")
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    clients.start()
    result = ended(clients)
    gaps_s = sorted(gap for reply in result.replies for gap in reply.gaps_s)
    num_events = sum(reply.num_events for reply in result.replies)
    wall_s = result.wall_s
    level = Level(
        num_streams,
        num_streams * TOKENS / wall_s,
        num_events / (num_streams * TOKENS),
        gaps_s[int(0.99 * len(gaps_s))],
        tuple((cpu_s(pid) - before_s[name]) / wall_s for name, pid in sorted(pids.items())),
        max(result.client_cpu_s) / wall_s,
    )
    print(level, flush=True)
    return level


def main() -> None:
    """Find what each number of routers carries, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routers", default="1,2", help="numbers of them, with commas between")
    parser.add_argument("--computes", type=int, default=4, help="and detokenizers")
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--first", type=int, default=500, help="streams to begin with")
    parser.add_argument("--most", type=int, default=16_000, help="streams")
    options = parser.parse_args()
    report = Report(
        "paced_routers",
        "What routers carry, each token as it is made",
        f"Steps of {STEP_S:g} s; p99 of the time between events of a stream at most {LATE_S:g} s, "
        f"and events for {APART:.0%} of tokens. Target: two routers carry 1.8 times what one does.",
    )
    rows: list[list[object]] = []
    with scratch_folder() as scratch:
        folder = save_folder(scratch / "sim", ring.SHAPE, with_weights=False)
        for count in map(int, options.routers.split(",")):
            rows.append(row_of(count, found(folder, count, options), rows))
    report.table(
        ["routers", "streams", "tokens/s", "of one", "gap p99, ms", "cores of each", "client"], rows
    )
    report.write()


def found(folder: Path, num_routers: int, options: argparse.Namespace) -> Level | None:
    """Find what so many routers carry."""
    settings = {
        "compute.sim_step_base_s": STEP_S,
        "compute.max_num_seqs": -(-options.most // options.computes),
        "compute.max_batched_token_mem": options.most * (TOKENS + 64),
        "compute.max_waiting": options.most,
        "router.max_in_flight": options.most,
        "router.max_in_flight_choices": options.most,
        "router.max_in_flight_tokens": options.most * (TOKENS + 64),
    }
    counts = {"router": num_routers, "compute": options.computes, "detokenizer": options.computes}
    given = [part for name, n in counts.items() for part in (f"--{name}s", str(n))]
    with Stack(folder, "--device", "sim", *given, settings=settings) as stack:
        return highest(
            lambda streams: measure(stack, streams, options.clients), options.first, options.most
        )


def row_of(num_routers: int, level: Level | None, before: list[list[object]]) -> list[object]:
    if level is None:
        return [num_routers, "none went well", "", "", "", "", ""]
    one = before[0][2] if before else level.tokens_per_s
    return [
        num_routers,
        level.num_streams,
        level.tokens_per_s,
        level.tokens_per_s / float(str(one)),
        1e3 * level.gap_p99_s,
        f"{statistics.mean(level.router_cores):.2f}",
        f"{level.client_cores:.2f}",
    ]


if __name__ == "__main__":
    main()
