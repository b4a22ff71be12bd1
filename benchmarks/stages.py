"""Stages against ranks over slow links: one model on two hosts of this machine, on the CPU.

    python -m benchmarks.stages [--rounds N]

Needs root, `ip` and /dev/net/tun. Every process stays while the link changes; each round measures
every kind once, so that what else the machine does falls on all of them. Engines are driven without
HTTP. Ranks on two hosts are nothing that can be had: here each plans for itself, alike, so that
only what they add up passes the link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from zlib import crc32

import numpy as np

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.slow_link import SlowLink
from benchmarks.stack import ROOT
from common.config import LinkSettings
from common.link.curve import create_keys
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.device import scheduler_settings
from services.compute.engine import Engine
from services.compute.runner.protocol import Runner
from services.compute.scheduler.outputs import sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler

HOSTS = ("first", "last")
LINKS = ((0.0, 0), (1.0, 1000), (5.0, 100))  # one way in ms; Mbit/s, 0 for what the machine has
STREAMS = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 64, 24
PORT = 7100
SHAPE = ModelShape(
    vocab_size=2000, hidden_size=512, intermediate_size=1536, num_layers=16, num_heads=8,
    num_kv_heads=4, initializer_range=0.1,
)  # fmt: skip
STAGES, RANKS, ALONE = "two stages", "two ranks", "one process"
SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=max(STREAMS),
    max_batched_token_mem=max(STREAMS) * 256, max_prefill_tokens=128, prefix_cache=False,
    num_threads=1,
)  # fmt: skip


def serve(runner: Runner) -> None:
    """Measure as often as standard input says how many streams there are; say how many tokens a
    second there were, and a checksum of them."""
    scheduler = Scheduler(runner.spec(), scheduler_settings(SETTINGS, runner.spec()), DecodeFirst())

    def fail(error: Exception, attempts: object) -> None:
        raise error

    engine = Engine(scheduler, runner, 1, time.monotonic, fail)
    print("ready", flush=True)
    rng, counter = np.random.default_rng(3), 0
    for line in sys.stdin:
        for _ in range(int(line)):
            counter += 1
            scheduler.add_request(request(counter, rng.integers(3, 1000, PROMPT_TOKENS)), 0.0)
        began_s = time.monotonic()
        while scheduler.has_work() or engine.num_in_flight:
            if not (engine.launch() and engine.has_room):
                engine.collect(force=True)
        took_s = time.monotonic() - began_s
        tokens: dict[int, list[int]] = defaultdict(list)
        for output in sequence_outputs(scheduler.drain_outputs()):
            tokens[output.attempt.counter] += output.token_ids
        print(
            int(line) * NEW_TOKENS / took_s,
            crc32(repr(sorted(tokens.items())).encode()),
            flush=True,
        )


def request(counter: int, prompt: np.ndarray) -> Generate:
    return Generate(
        attempt=AttemptId("bench", counter),
        detokenizer=Address("inproc://detokenizer", "0"),
        prompt_ids=int32s(prompt.tolist()).tobytes(),
        output_ids=int32s(),
        sampling=SamplingParams(NEW_TOKENS, seed=0, temperature=0.0, ignore_eos=True),
        header=b"",
        admitted_at_s=0.0,
    )


def run_alone(folder: str) -> None:
    from services.compute.runner.registry import load_runner

    serve(load_runner(Path(folder), SETTINGS))


def run_rank(folder: str, rank: str, store: str, address: str) -> None:
    from services.compute.distributed import gloo
    from services.compute.runner.eager import load_eager
    from services.compute.runner.packing_runner import PackingRunner

    gloo.LOOPBACK = address  # of this host's link
    serve(PackingRunner(load_eager(Path(folder), SETTINGS, gloo.GlooRanks(int(rank), 2, store))))


def run_leader(folder: str, keys: str, *inboxes: str) -> None:
    from services.compute.runner.registry import load_runner

    settings = SETTINGS.model_copy(
        update={"pipeline_parallel_size": len(inboxes), "pipeline_stages": inboxes}
    )
    links = LinkSettings.model_validate({"curve_dir": keys})
    serve(load_runner(Path(folder), settings, links))


class TwoHosts:
    """The processes of all kinds, each on its host."""

    def __init__(self, scratch: Path) -> None:
        self.link = SlowLink(HOSTS)
        self._processes: list[subprocess.Popen[str]] = []
        folder, keys = str(save_folder(scratch / "model", SHAPE)), str(scratch / "keys")
        create_keys(keys)
        addresses = [self.link.addresses[host] for host in HOSTS]
        inboxes = [f"tcp://{address}:{PORT}" for address in addresses]
        stage = ("-m", "services.compute.runner.stage", inboxes[0], "--keys", keys)
        self._start(HOSTS[0], *stage)
        store = str(scratch / "store")
        ranks = [
            self._role(host, "rank", folder, str(rank), store, address)
            for rank, (host, address) in enumerate(zip(HOSTS, addresses, strict=True))
        ]
        self._by_kind = {
            ALONE: [self._role(HOSTS[0], "alone", folder)],
            RANKS: ranks,
            STAGES: [self._role(HOSTS[1], "leader", folder, keys, *inboxes)],
        }
        for processes in self._by_kind.values():
            for process in processes:
                if _output(process).readline() != "ready\n":
                    self.close()
                    raise SystemExit("a process has not started; see what it said above")

    def measure(self, kind: str, num_streams: int) -> tuple[float, str]:
        """Tokens a second, and their checksum."""
        processes = self._by_kind[kind]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{num_streams}\n")
            process.stdin.flush()
        said = [_output(process).readline().split() for process in processes]
        return min(float(speed) for speed, _ in said), said[0][1]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.link.close()

    def _role(self, host: str, role: str, *arguments: str) -> subprocess.Popen[str]:
        return self._start(host, "-m", "benchmarks.stages", "--role", role, *arguments)

    def _start(self, host: str, *command: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        enter = (*self.link.inside(host), sys.executable)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen((*enter, *command), text=True, env=env, **pipes)
        self._processes.append(process)
        return process


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


ROLES: dict[str, Callable[..., None]] = {"alone": run_alone, "rank": run_rank, "leader": run_leader}


def measure_all(hosts: TwoHosts, rounds: int) -> list[list[object]]:
    """A row for each link and number of streams: the medians of each kind, and ratios of stages to
    ranks in a round."""
    rows: list[list[object]] = []
    for delay_ms, rate_mbit in LINKS:
        hosts.link.slow_down(delay_ms, rate_mbit)
        link = f"{delay_ms:g} ms, {rate_mbit:,} Mbit/s" if rate_mbit else "as it is"
        for streams in STREAMS:
            found = defaultdict(list)
            for _ in range(rounds):
                said = {kind: hosts.measure(kind, streams) for kind in (ALONE, RANKS, STAGES)}
                if len({checksum for _, checksum in said.values()}) > 1:
                    sys.stderr.write(f"{link}, {streams} streams: the texts differ\n")
                for kind, (speed, _) in said.items():
                    found[kind].append(speed)
                found["ratio"].append(said[STAGES][0] / said[RANKS][0])
            medians = [statistics.median(found[kind]) for kind in (ALONE, RANKS, STAGES)]
            ratios = sorted(found["ratio"])
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            rows.append([link, streams, *medians, statistics.median(ratios), spread])
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ROLES[options.role](*options.arguments)
        return
    with TemporaryDirectory(prefix="slipstream-") as scratch:
        hosts = TwoHosts(Path(scratch))
        try:
            rows = measure_all(hosts, options.rounds)
        finally:
            hosts.close()
    report = Report("stages", "Stages against ranks over slow links", PURPOSE)
    report.table(
        ("link, one way", "streams", ALONE, RANKS, STAGES, "stages / ranks", "of rounds"), rows
    )
    report.write()


PURPOSE = f"""\
Output tokens/s of a model of {SHAPE.num_layers} layers and 54 million weights in float32, on two
hosts: network namespaces, and a process between them that hands on their packets late. Each process
has one thread. Of requests of {PROMPT_TOKENS} tokens, {NEW_TOKENS} are generated. Stages speak with
keys (CURVE). Ranks on two hosts cannot be had: here each plans for itself, alike, so that nothing
passes the link but what they add up. Medians of rounds, each of which measures all kinds once."""


if __name__ == "__main__":
    main()
