"""What does one more of a service add, and what do links between hosts cost a token?

    python -m benchmarks.scale_out [--most 2] [--pairs 8]

Of one service there are one, two and more replicas, of the others always the most, under a load
that presses that service: chats of 4 KB for the tokenizer, tokens for the router and the
detokenizer, and for compute a virtual device that carries so many tokens a second. Where fewer
cores are there than busy processes the machine is the limit, not the service; so beside each rate
stands the processor time that a chat or a token took, from which follows what a core carries, and
how full the machine was.

Links: one stream at a ring on ipc, which the launcher starts, and one at a ring on tcp with CURVE
keys, in turn. Needs root and `ip` for the second one.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import hosts, ring, sizing
from benchmarks.load import ended
from benchmarks.model_folders import save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s, scratch_folder
from services.bench.client import Clients, OfferedLoad, ServerAddress

SERVICES = ("router", "tokenizer", "compute", "detokenizer")
STREAMS_PER_REPLICA = 64
TOKENS = 400  # of a stream
FREE_STEP_S = 0.002  # more tokens than a router carries
DEVICE_STEP_S, DEVICE_ROWS = 0.04, 16  # 400 tokens a second of a compute
DEVICE_TOKENS = 100
CHATS_PER_REPLICA = 400
LINK_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server to press one service; `unit` is what its rate counts."""

    unit: str
    path: str
    bodies: tuple[dict[str, object], ...]
    num_streams: int
    num_units: int
    settings: Mapping[str, object]


def load_for(service: str, num_replicas: int) -> Load:
    """Return a load that grows with the replicas, so that each has as much to do."""
    if service == "tokenizer":
        bodies = (sizing.body(sizing.SENTENCE * 50),) * (CHATS_PER_REPLICA * num_replicas)
        streams = sizing.NUM_STREAMS * num_replicas
        return Load(
            "chat", sizing.PATH, bodies, streams, len(bodies), {"compute.sim_step_base_s": 0}
        )
    is_device = service == "compute"
    step_s = DEVICE_STEP_S if is_device else FREE_STEP_S
    rows, tokens = (DEVICE_ROWS, DEVICE_TOKENS) if is_device else (1024, TOKENS)
    num_streams = num_replicas * (2 * DEVICE_ROWS if is_device else STREAMS_PER_REPLICA)
    settings = {"compute.sim_step_base_s": step_s, "compute.max_num_seqs": rows}
    bodies = tuple(ring.body(tokens, number) for number in range(num_streams))
    return Load("token", "/v1/completions", bodies, num_streams, tokens * num_streams, settings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load: units a second, and the processor seconds of each service's replicas."""

    num_replicas: int
    unit: str
    num_units: int
    wall_s: float
    cpu_s: dict[str, list[float]]

    @property
    def rate(self) -> float:
        return self.num_units / self.wall_s

    def cost_us(self, service: str) -> float:
        """Processor microseconds of all replicas of a service for a unit."""
        return 1e6 * sum(self.cpu_s[service]) / self.num_units

    def busiest(self, service: str) -> float:
        """The share of a core that the busiest replica took."""
        return max(self.cpu_s[service]) / self.wall_s

    @property
    def cores(self) -> float:
        """The cores that the services took together."""
        return sum(map(sum, self.cpu_s.values())) / self.wall_s


def measure(folder: Path, service: str, num_replicas: int, most: int) -> Outcome:
    """Run the load of a service against so many of it."""
    counts = {**dict.fromkeys(SERVICES, most), service: num_replicas}
    options = [part for name, n in counts.items() for part in (f"--{name}s", str(n))]
    load = load_for(service, num_replicas)
    with Stack(folder, "--device", "sim", *options, settings=load.settings) as stack:
        server = ServerAddress("127.0.0.1", stack.port)
        requests = tuple(server.post(load.path, body) for body in load.bodies)
        pids = stack.pids()
        for is_measured in (False, True):
            clients = Clients(server, OfferedLoad(requests, load.num_streams), min(most, 4))
            before_s = {name: cpu_s(pid) for name, pid in pids.items()}
            clients.start()
            wall_s = ended(clients).wall_s
            if is_measured:
                taken = {name: cpu_s(pid) - before_s[name] for name, pid in pids.items()}
    by_service = {
        kind: [s for name, s in taken.items() if name.rpartition("-")[0] == kind]
        for kind in SERVICES
    }
    return Outcome(num_replicas, load.unit, load.num_units, wall_s, by_service)


def report_sweep(report: Report, service: str, outcomes: list[Outcome]) -> None:
    """Write what the replicas of one service gave."""
    first, unit = outcomes[0], outcomes[0].unit
    report.text(f"### {service}")
    report.table(
        [
            f"{service}s",
            f"{unit}s/s",
            "of one",
            f"its µs a {unit}",
            "a core carries",
            "cost of one",
            "busiest replica, cores",
            "all services, cores",
        ],
        [
            [
                each.num_replicas,
                each.rate,
                each.rate / first.rate,
                each.cost_us(service),
                f"{1e6 / each.cost_us(service):,.0f}",
                each.cost_us(service) / first.cost_us(service),
                each.busiest(service),
                each.cores,
            ]
            for each in outcomes
        ],
    )


def report_costs(report: Report, chat: Outcome, token: Outcome) -> None:
    """Write what a chat and a token cost every service."""
    report.text("### Processor time of every service")
    report.table(
        ["", "µs a chat of 4 KB", "µs a token"],
        [[service, chat.cost_us(service), token.cost_us(service)] for service in SERVICES],
    )


def link_pairs(folder: Path, num_pairs: int) -> Iterator[tuple[float, float]]:
    """Yield the median milliseconds that a ring adds to a token: on ipc, and on tcp with keys."""
    settings = {"compute.device": "sim", "compute.sim_step_base_s": ring.LATENCY_STEP_S}
    layout = {"host": [f"{service}-0" for service in SERVICES]}
    with (
        Stack(folder, "--device", "sim", settings=settings) as near,
        hosts.Hosts(folder, layout, settings) as far,
    ):
        for number in range(num_pairs + 1):
            order = (near.port, far.port) if number % 2 else (far.port, near.port)
            found = {port: statistics.median(ring.added_s(port, LINK_TOKENS)) for port in order}
            if number:  # the first one warms up
                yield 1e3 * found[near.port], 1e3 * found[far.port]


def report_links(report: Report, pairs: list[tuple[float, float]]) -> None:
    """Write the latency of both kinds of links, pair by pair."""
    report.text(
        "## Links on tcp with CURVE keys against ipc\n\nAdded to a token of one stream by the "
        f"ring, which is two hops, with steps of {ring.LATENCY_STEP_S * 1e3:g} ms; medians of "
        f"{LINK_TOKENS} tokens, ms. Both rings are on this machine: what a wire takes comes on top."
    )
    rows = [[f"pair {n}", *pair, pair[1] / pair[0]] for n, pair in enumerate(pairs, 1)]
    near, far = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(far / near for near, far in pairs)
    report.table(["", "ipc", "tcp, CURVE", "ratio"], [*rows, ["**median**", near, far, ratio]])


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    most = min(8, max(2, (os.cpu_count() or 1) // 4))
    parser.add_argument(
        "--most", type=int, default=most, help="replicas (default here: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=8, help="of rings with different links")
    arguments = parser.parse_args()
    report = Report(
        "scale_out",
        "What one more of a service adds, and what links between hosts cost",
        "Targets: one more of the service that is short moves the throughput; two routers carry "
        "1.8 times as much as one or more, where there are cores for them.",
    )
    report.text(
        "## Replicas\n\nOf the other services there are "
        f"{arguments.most} each. The load grows with the replicas. Clients take cores, too."
    )
    with scratch_folder() as scratch:
        folder = save_folder(scratch / "sim", ring.SHAPE, with_weights=False)
        found = {
            service: [
                measure(folder, service, n, arguments.most) for n in range(1, arguments.most + 1)
            ]
            for service in SERVICES
        }
        for service, outcomes in found.items():
            report_sweep(report, service, outcomes)
        report_costs(report, found["tokenizer"][0], found["router"][0])
        if why_not := hosts.why_not():
            report.text(f"Links on tcp were not measured: {why_not}.")
        else:
            report_links(report, list(link_pairs(folder, arguments.pairs)))
    report.write()


if __name__ == "__main__":
    main()
