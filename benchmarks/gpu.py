"""The workloads on a GPU: sets up, checks, measures the whole stack, and prints one table.

    python -m benchmarks.gpu [--models llama-8b,llama-1b] [--workloads A,B,C] [--quick]

Model folders are made on the spot (real shapes, dummy weights). One call stays within
`--time-limit`: what there is no time for is left out, and the page says so. `--device sim` or
`--device cpu` with `--models tiny` tries the program out without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_figures import GpuFigures
from benchmarks.gpu_models import NUM_SPECIAL, SHAPES, make_folder
from benchmarks.gpu_page import Findings, Row, make_page, name_of_device
from benchmarks.gpu_server import CHECKED_PROMPT, Server, Setup
from benchmarks.report import RESULTS
from benchmarks.stack import StackError, scratch_folder
from services.bench.client import ClientError
from services.bench.workloads import (
    FIRST_ID,
    LAST_ID,
    WORKLOADS,
    BenchRequest,
    Lengths,
    Workload,
    requests_of,
)

NEEDS_GPU = True  # `python -m benchmarks` leaves it out where there is none
SECTIONS = ("checks", "workloads")
QUICK_SHARE = 0.5
MIN_START_S = 30.0  # a server is not started with less left
WORKLOAD_LIMIT_S = 120.0
STOP_RESERVE_S = 15.0
AHEAD = "one step ahead"
WARM_UP = (
    Workload("wa", 1, 3, Lengths(128), Lengths(32)),
    Workload("wb", 64, 128, Lengths(256), Lengths(48)),
    Workload("wc", 256, 256, Lengths(64), Lengths(24)),
    Workload("wd", 8, 16, Lengths(3000), Lengths(8)),
)


class OutOfTimeError(Exception):
    """The call's time is spent."""


class Session:
    """One call: servers one after the other, and what they did."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self.findings = Findings()
        self.notes: list[str] = []
        self._arguments = arguments
        self._scratch = scratch
        self._began_s = time.monotonic()
        self._setup = Setup(
            device=arguments.device,
            dtype=arguments.dtype,
            num_routers=arguments.routers,
            num_detokenizers=arguments.detokenizers,
            num_clients=arguments.clients,
            settings=dict(pair.split("=", 1) for pair in arguments.set),
        )

    def run(self) -> None:
        """Serve each model in turn; what goes wrong with one is noted, and the next begins."""
        for model in self._arguments.models:
            self._guarded(model, self._one_model)

    def _guarded(self, model: str, serve: Callable[[str], None]) -> None:
        try:
            if self._left_s() < MIN_START_S:
                raise OutOfTimeError("no time was left to start it")
            serve(model)
        except (StackError, ClientError, OutOfTimeError, OSError) as error:
            self._say(f"{model}: {type(error).__name__}: {error}")
            self.findings.checks.append((model, (str(error).splitlines()[0],)))
        self.save()

    def _one_model(self, model: str) -> None:
        with self._started(model, AHEAD) as server:
            self._say(f"{model}: ready after {server.start_s:.1f} s")
            if "checks" in self._arguments.sections:
                dice = requests_of(
                    Workload("check", 1, 1, Lengths(CHECKED_PROMPT), Lengths(1)),
                    self._arguments.seed,
                    vocabulary=self._vocabulary(model),
                )
                found = server.differences_of_repeats(dice[0].prompt_ids)
                self._check(f"{model}, a greedy request asked twice", found)
            if "workloads" in self._arguments.sections:
                self._workloads(server)
            self._check(f"{model}, every table empty and every page free", server.leftovers())
            memory = ", ".join(f"{k} {v:,.0f}" for k, v in server.memory_mib().items())
            self._say(f"{model}: MiB in use: {memory}")
            self._end(server, AHEAD)

    def _workloads(self, server: Server) -> None:
        self._warm_up(server)
        for repeat in range(self._arguments.repeats):
            for name in self._arguments.workloads:
                try:
                    figures = self._measure(server, WORKLOADS[name], repeat)
                except ClientError as error:  # the next one may be shorter
                    self._check(f"{server.model} {name}", (str(error),))
                    continue
                self._check(f"{server.model} {name}, every answer as asked", figures.problems)
                self.findings.rows.append(Row(server.model, name, figures))
                self.save()

    @contextlib.contextmanager
    def _started(self, model: str, how: str, **settings: object) -> Iterator[Server]:
        self._say(f"{model}: starting")
        folder = make_folder(self._scratch / model, SHAPES[model])
        with Server(self._setup, folder, self._left_s(), **settings) as server:
            if server.command not in self.findings.commands:
                self.findings.commands.append(server.command)
            try:
                yield server
            finally:
                if self._arguments.logs:
                    name = f"{model}-{how.replace(' ', '-')}.log"
                    (self._arguments.logs / name).write_text(server.stack.log())

    def _end(self, server: Server, how: str) -> None:
        stopped, problems = server.stop()
        self._check(f"{server.model} ({how}), its end and its log", problems)
        self.findings.engines.append((server.model, how, server.start_s, stopped))

    def _warm_up(self, server: Server) -> None:
        for workload in WARM_UP:
            workload = workload.scaled(self._arguments.warm_up)
            asks = self._asks(server.model, workload, 0)
            figures = server.measure(asks, workload.concurrency, self._limit_s())
            problem = f"; {figures.problems[0]}" if figures.problems else ""
            self._say(f"{server.model}: warm-up {workload.name} {figures.wall_s:.2f} s{problem}")

    def _measure(
        self, server: Server, workload: Workload, repeat: int, how: str = AHEAD
    ) -> GpuFigures:
        workload = workload.scaled(self._arguments.scale)
        asks = self._asks(server.model, workload, repeat)
        figures = server.measure(asks, workload.concurrency, self._limit_s())
        self._say(
            f"{server.model} {workload.name}: {figures.tokens_per_s:,.0f} tokens/s, "
            f"{figures.wall_s:.2f} s, TTFT {1e3 * figures.ttft.p50_s:.1f}/"
            f"{1e3 * figures.ttft.p99_s:.1f} ms, ITL {1e3 * figures.itl.p50_s:.2f} ms, "
            f"TPOT {1e3 * figures.tpot.mean_s:.2f} ms, client {figures.client_share:.2f} "
            f"({1e6 * figures.client_cpu_per_token_s:.1f} µs/token), CPU "
            + ", ".join(f"{name} {used:.2f}" for name, used in figures.cpu_s.items())
        )
        self._say(f"{server.model} {workload.name}: {figures.device}")
        for problem in figures.problems:
            self._say(f"{server.model} {workload.name}: {problem}")
        if self._arguments.logs:
            name = f"{server.model}-{how.replace(' ', '-')}-{workload.name}-{repeat}.trace.json"
            server.save_trace(self._arguments.logs / name)
        return figures

    def _asks(self, model: str, workload: Workload, repeat: int) -> list[BenchRequest]:
        asks = requests_of(workload, self._arguments.seed, repeat, self._vocabulary(model))
        longest = self._arguments.max_output
        return [replace(ask, max_tokens=min(ask.max_tokens, longest)) for ask in asks]

    def _vocabulary(self, model: str) -> range:
        return range(FIRST_ID, min(LAST_ID, SHAPES[model].vocab_size - NUM_SPECIAL))

    def _limit_s(self) -> float:
        left_s = self._left_s() - STOP_RESERVE_S
        if left_s <= 0:
            raise OutOfTimeError("the time of this call was over")
        return min(WORKLOAD_LIMIT_S, left_s)

    def _left_s(self) -> float:
        return float(self._arguments.time_limit) - (time.monotonic() - self._began_s)

    def _check(self, name: str, problems: tuple[str, ...]) -> None:
        self.findings.checks.append((name, problems))
        self._say(f"{name}: {'; '.join(problems) if problems else 'as it should be'}")

    def _note(self, text: str) -> None:
        self.notes.append(text.splitlines()[0])
        self._say(text)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)

    def save(self) -> str:
        """Write the page as far as it has come; returns it."""
        arguments = self._arguments
        notes = [f"seed {arguments.seed}", *self.notes]
        if arguments.scale != 1:
            notes.append(f"{arguments.scale:g} of each workload's requests: no figures to compare")
        page = make_page(self.findings, name_of_device(arguments.device), notes).page
        if arguments.out:
            arguments.out.write_text(page)
        return page


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=_names(SHAPES), default=["llama-8b", "llama-1b"])
    add("--workloads", type=_names(WORKLOADS), default=["A", "B", "C"])
    add("--sections", type=_names(SECTIONS), default=list(SECTIONS))
    add("--quick", action="store_true", help="half of the requests")
    add("--device", default="cuda", choices=("cuda", "cpu", "sim"))
    add("--dtype", default="bfloat16")
    add("--routers", type=int, default=1)
    add("--detokenizers", type=int, default=1)
    add("--clients", type=int, default=4, help="processes that ask")
    add("--seed", type=int, default=1, help="of lengths and ids (the record's: 1)")
    add("--repeats", type=int, default=1, help="of each workload, with other prompts")
    add("--scale", type=float, default=1.0, help="share of each workload's requests")
    add("--warm-up", type=float, default=1.0, help="share of the warm-up's requests")
    add("--max-output", type=int, default=1 << 20, help="longest answer, for a try")
    add("--set", action="append", default=[], metavar="TABLE.FIELD=VALUE", help="a setting")
    add("--time-limit", type=float, default=470.0, help="seconds for everything")
    add("--out", type=Path, help="where the page goes (default: results/gpu.md if all was run)")
    add("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs, and traces")
    arguments = parser.parse_args(given)
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    if arguments.quick:
        arguments.scale *= QUICK_SHARE
    whole = arguments.device == "cuda" and given is None and len(sys.argv) == 1
    if arguments.out is None and whole:
        arguments.out = RESULTS / "gpu.md"
    return arguments


def _names(known: object) -> Callable[[str], list[str]]:
    allowed = list(known)  # type: ignore[call-overload]

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]}; there are {', '.join(allowed)}")
        return chosen

    return names


def main() -> int:
    """Run everything; 1 if a check failed."""
    arguments = parse()
    with scratch_folder() as scratch:
        session = Session(arguments, scratch)
        session.run()
        print("\n" + session.save())
    for problem in session.findings.failed:
        print(f"FAILED {problem}")
    return 1 if session.findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
