"""What does one more of a service add?

    python -m benchmarks.scale_out [--only router,compute] [--most 4] [--seconds 3] [--raw FILE]

Of one service there are one, two and more replicas, then fewer again, by `slipstream scale` while
the server runs; of the others there are always the most. The load is the same for all counts, more
than the most replicas carry, and presses that one service: chats of 4 KB for the tokenizer, tokens
of a device that takes no time for router and detokenizer, and for compute a virtual device that
carries so many tokens a second. Where fewer cores are there than busy processes the machine is the
limit, not the service; so beside each rate stands how busy the replicas, the machine and the
clients were, and the processor time of a chat or a token, from which follows what a core carries.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ring, sizing
from benchmarks.load import ended
from benchmarks.model_folders import save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, scratch_folder
from services.bench.client import Clients, LoadResult, OfferedLoad, ServerAddress

SERVICES = ("router", "tokenizer", "compute", "detokenizer")
STREAMS_PER_REPLICA = 128
TOKENS = 2000  # of a stream
CHATS_PER_REPLICA = 32  # at once
DEVICE_STEP_S, DEVICE_ROWS = 0.01, 16  # 1,600 tokens a second of a compute
DEVICE_TOKENS = 50
SETTLE_S = 1.5  # workers look for routers every second
PROCESSES_PER_REPLICA = 2  # of clients


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server to press one service: `units` is what a request asks for."""

    unit: str
    path: str
    bodies: tuple[dict[str, object], ...]  # one for each stream
    units: int
    settings: Mapping[str, object]

    def requests(self, num_units: float) -> OfferedLoad:
        """Return so many units, but a request of each stream at least."""
        count = max(len(self.bodies), round(num_units / self.units))
        server = ServerAddress("127.0.0.1", 0)
        rendered = [server.post(self.path, body) for body in self.bodies]
        return OfferedLoad(
            tuple(rendered[number % len(rendered)] for number in range(count)), len(rendered)
        )


def load_for(service: str, most: int, tokens: int) -> Load:
    """Return what so many replicas of a service cannot carry."""
    if service == "tokenizer":
        settings = {"compute.sim_step_base_s": 0, "tokenizer.pool_size": 1}
        chats = (sizing.body(sizing.SENTENCE * 50),) * (CHATS_PER_REPLICA * most)
        return Load("chat", sizing.PATH, chats, 1, settings)
    is_device = service == "compute"
    tokens = DEVICE_TOKENS if is_device else tokens
    num_streams = most * (2 * DEVICE_ROWS if is_device else STREAMS_PER_REPLICA)
    settings = {
        "compute.sim_step_base_s": DEVICE_STEP_S if is_device else 0,
        "compute.max_num_seqs": DEVICE_ROWS if is_device else num_streams,
        "compute.max_batched_token_mem": num_streams * (tokens + 64),
    }
    bodies = tuple(ring.body(tokens, number) for number in range(num_streams))
    return Load("token", "/v1/completions", bodies, tokens, settings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load: units, and the processor seconds of each replica and each client."""

    service: str
    num_replicas: int
    unit: str
    num_units: int
    wall_s: float
    cpu_s: dict[str, list[float]]
    client_cpu_s: list[float]

    @property
    def rate(self) -> float:
        return self.num_units / self.wall_s

    @property
    def cost_us(self) -> float:
        """Processor microseconds of all replicas of the service for a unit."""
        return 1e6 * sum(self.cpu_s[self.service]) / self.num_units

    @property
    def shares(self) -> list[float]:
        """The share of a core that each replica took."""
        return [seconds / self.wall_s for seconds in self.cpu_s[self.service]]

    @property
    def cores(self) -> float:
        """The cores that services and clients took together."""
        return (sum(map(sum, self.cpu_s.values())) + sum(self.client_cpu_s)) / self.wall_s


def sweep(folder: Path, service: str, most: int, seconds: float, tokens: int) -> Iterator[Outcome]:
    """Run a service's load against one, two, … the most of it, and then fewer again."""
    load = load_for(service, most, tokens)
    counts = {**dict.fromkeys(SERVICES, most), service: 1}
    options = [part for name, n in counts.items() for part in (f"--{name}s", str(n))]
    with Stack(folder, "--device", "sim", *options, settings=load.settings) as stack:
        for count in (*range(1, most + 1), *range(most - 1, 0, -1)):
            stack.scale(**{service: count})
            time.sleep(SETTLE_S)
            first = run(stack, load, 0, most)[0]
            rate = len(first.replies) * load.units / first.wall_s
            result, taken = run(stack, load, rate * seconds, most)
            num_units = len(result.replies) * load.units
            yield Outcome(
                service, count, load.unit, num_units, result.wall_s, taken, result.client_cpu_s
            )


def run(
    stack: Stack, load: Load, num_units: float, most: int
) -> tuple[LoadResult, dict[str, list[float]]]:
    """Ask for so many units; returns what came, and the processor seconds of each replica."""
    server = ServerAddress("127.0.0.1", stack.port)
    clients = Clients(server, load.requests(num_units), PROCESSES_PER_REPLICA * most)
    pids = stack.pids()
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    clients.start()
    result = ended(clients)
    taken: dict[str, list[float]] = {service: [] for service in SERVICES}
    for name, pid in sorted(pids.items()):
        taken[name.rpartition("-")[0]].append(cpu_s(pid) - before_s[name])
    return result, taken


def rows_of(outcomes: list[Outcome]) -> Iterator[list[object]]:
    """One row for each service and number of replicas, of all runs with so many."""
    for service in dict.fromkeys(each.service for each in outcomes):
        of_service = [each for each in outcomes if each.service == service]
        one = mean_rate(of_service, 1)
        for count in sorted({each.num_replicas for each in of_service}):
            runs = [each for each in of_service if each.num_replicas == count]
            cost_us = sum(each.cost_us for each in runs) / len(runs)
            shares = [share for each in runs for share in each.shares]
            clients = [s / each.wall_s for each in runs for s in each.client_cpu_s]
            yield [
                f"{service} × {count}",
                f"{mean_rate(runs, count):,.0f} {runs[0].unit}s",
                mean_rate(runs, count) / one,
                f"{min(shares):.2f} to {max(shares):.2f}",
                cost_us,
                f"{1e6 / cost_us:,.0f}",
                max(each.cores for each in runs),
                max(clients),
            ]


def mean_rate(outcomes: list[Outcome], num_replicas: int) -> float:
    rates = [each.rate for each in outcomes if each.num_replicas == num_replicas]
    return sum(rates) / len(rates)


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    most = min(4, max(2, (os.cpu_count() or 1) // 4))
    parser.add_argument("--only", default=",".join(SERVICES), help="services, with commas between")
    parser.add_argument(
        "--most", type=int, default=most, help="replicas (default here: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, about")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument("--raw", metavar="FILE", help="where to write all runs, as JSON lines")
    arguments = parser.parse_args()
    report = Report(
        "scale_out",
        "What one more of a service adds",
        "Targets: one more of the service that is short moves the throughput; two routers carry "
        "1.8 times as much as one or more, where there are cores for them.",
    )
    outcomes: list[Outcome] = []
    with scratch_folder() as scratch:
        folder = save_folder(scratch / "sim", ring.SHAPE, with_weights=False)
        for service in arguments.only.split(","):
            for outcome in sweep(
                folder, service, arguments.most, arguments.seconds, arguments.tokens
            ):
                outcomes.append(outcome)
                print(f"{service} × {outcome.num_replicas}: {outcome.rate:,.0f}/s", flush=True)
                if arguments.raw:
                    with open(arguments.raw, "a") as raw:
                        raw.write(json.dumps(asdict(outcome)) + "\n")
    report.text(
        f"Of the other services there are {arguments.most} each; a tokenizer has one process that "
        "encodes. Each number of replicas but the last was measured twice, on the way up and on "
        "the way down: rates are means."
    )
    report.table(
        [
            "replicas",
            "a second",
            "of one",
            "cores of each",
            "µs each",
            "a core carries",
            "all cores",
            "busiest client, cores",
        ],
        list(rows_of(outcomes)),
    )
    report.write()


if __name__ == "__main__":
    main()
