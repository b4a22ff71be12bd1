"""Many short requests of every kind, with clients that leave: afterwards nothing may be left.

    python -m benchmarks.soak [--requests 20000] [--device sim] [--in-process]

Few KV pages for many streams, so that sequences are preempted all the time; shared prefixes,
several choices, every way to sample, stop strings, clients that disconnect anywhere. First
against the whole stack over HTTP, then against scheduler, engine and runner alone, where the
preemptions can be counted. At the end every table is empty and every page free, no request has
failed, no process has grown or has more memory than its bound, and on a device that is
deterministic a sample of requests asked again, alone, gives the same answers.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

import uvloop

from benchmarks.gpu_models import NUM_SPECIAL, SHAPES, make_folder
from benchmarks.gpu_page import name_of_device
from benchmarks.gpu_server import PATH, errors_logged, wait_clean
from benchmarks.report import RESULTS, Report
from benchmarks.soak_clients import Tally, ask_alone, soak
from benchmarks.soak_engine import EngineSoak, EngineTally
from benchmarks.soak_requests import Mix
from benchmarks.stack import Stack, rss_mib, scratch_folder
from services.compute.config import ComputeSettings

MAX_MODEL_LEN = 1024
READY_WITHIN_S = 300.0
STOPPED_WITHIN_S = 60.0
NUM_PROGRESS_LINES = 10
GROWTH_FROM = 0.3  # of the requests; by then every table has had its size
MAX_GROWTH, MAX_GROWTH_MIB = 1.2, 24.0
MAX_MIB = {  # of each process; docs/operations.md says so much for a small vocabulary
    "launcher": 96.0,
    "router": 160.0,
    "tokenizer": 128.0,
    "tokenizer/worker": 128.0,
    "compute": 128.0,
    "compute/mask_worker": 128.0,
    "detokenizer": 128.0,
}
MAX_CPU_MIB = 640.0  # of compute with the tiny model on the CPU: torch, and the kernels it keeps
FIRST_ID = 256  # below are single bytes, many of which are no text
SIM_STEP_S = 0.001


@dataclass(slots=True)
class Soak:
    """One call: what it was asked for, and what it found."""

    arguments: argparse.Namespace
    report: Report
    failed: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    memory: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)

    def mix(self) -> Mix:
        """Return the source of requests."""
        arguments = self.arguments
        vocab_size = SHAPES[arguments.model].vocab_size
        return Mix(arguments.model, arguments.seed, FIRST_ID, vocab_size - NUM_SPECIAL)

    def keeps(self) -> frozenset[int]:
        """Choose the requests that are asked again."""
        numbers = range(self.arguments.requests)
        count = min(self.arguments.repeated, len(numbers))
        return frozenset(random.Random(self.arguments.seed).sample(numbers, count))

    def settings(self) -> dict[str, object]:
        """Return the `[compute]` settings."""
        arguments = self.arguments
        return {
            "device": arguments.device,
            "dtype": arguments.dtype,
            "load_format": "dummy",
            "max_model_len": MAX_MODEL_LEN,
            "max_batched_token_mem": arguments.kv_tokens,
            "sim_step_base_s": SIM_STEP_S,
            **dict(pair.split("=", 1) for pair in arguments.set),
        }

    def check(self, what: str, problems: list[str]) -> None:
        """Note whether something is as it should be."""
        self.say(f"{what}: {'; '.join(problems) if problems else 'yes'}")
        self.failed += [f"{what}: {problem}" for problem in problems]
        self.checks.append(f"- {what}: {'; '.join(problems) if problems else 'yes'}")

    def end_section(self) -> None:
        """Put the checks so far on the page."""
        self.report.text("\n".join(self.checks))
        self.checks.clear()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {text}", flush=True)

    def out_of_time(self) -> bool:
        """Whether no new requests are to be begun."""
        return time.monotonic() - self.began_s > self.arguments.time_limit

    def numbers(self) -> Iterator[int]:
        """Yield the requests' numbers as long as there is time."""
        for number in range(self.arguments.requests):
            if self.out_of_time():
                return
            yield number


def soak_stack(run: Soak, folder: Path) -> None:
    """Soak the whole stack, over HTTP."""
    arguments = run.arguments
    settings = {f"compute.{name}": value for name, value in run.settings().items()}
    settings["router.min_priority"] = -1  # what the mix asks for
    stack = Stack(folder, "--routers", str(arguments.routers), settings=settings)
    with stack.wait_ready(READY_WITHIN_S):
        run.say(f"the stack is ready: {stack.command.replace(str(folder), folder.name)}")
        began_s = time.monotonic()
        ended = partial(_on_ended, run, stack)
        url = stack.url + PATH
        work = soak(
            url, run.mix(), run.numbers(), arguments.streams, run.keeps().__contains__, ended
        )
        tally = uvloop.run(work)
        wall_s = time.monotonic() - began_s
        left = wait_clean(stack, arguments.routers)
        differing = uvloop.run(ask_alone(url, run.mix(), tally))
        left_again = wait_clean(stack, arguments.routers)
        status = stack.stop(STOPPED_WITHIN_S)
        _report_stack(run, tally, wall_s)
        run.check("no request failed and every answer is as asked", _shown(tally))
        if tally.num_ended < arguments.requests:
            run.check("all were asked", [f"{tally.num_ended} of {arguments.requests}: no time"])
        run.check("every table empty and every page free", [*left, *left_again])
        _check_repeats(run, len(tally.kept), differing)
        run.check("no process has grown", growth(run.memory, arguments.requests))
        run.check("every process keeps its bound", beyond(run.memory, max_mib(arguments.device)))
        run.check("it ended well", [] if status == 0 else [f"status {status}"])
        run.check("nothing was logged as an error", errors_logged(stack))
        run.end_section()


def _on_ended(run: Soak, stack: Stack, tally: Tally) -> None:
    every = max(1, run.arguments.requests // NUM_PROGRESS_LINES)
    if tally.num_ended % every == 0:
        memory = {name: rss_mib(pid) for name, pid in stack.processes().items()}
        run.memory.append((tally.num_ended, memory))
        run.say(
            f"{tally.num_ended} ended, {tally.num_left} left by their clients, "
            f"{tally.num_failed} failed; MiB: "
            + ", ".join(f"{name} {used:.0f}" for name, used in memory.items())
        )


def growth(memory: list[tuple[int, dict[str, float]]], num_requests: int) -> list[str]:
    """Name the processes that have grown since a part of the requests had ended."""
    settled = [used for ended, used in memory if ended >= GROWTH_FROM * num_requests]
    if len(settled) < 2:
        return []
    first, last = settled[0], settled[-1]
    return [
        f"{name} from {first[name]:.0f} to {used:.0f} MiB"
        for name, used in last.items()
        if name in first and used > MAX_GROWTH * first[name] + MAX_GROWTH_MIB
    ] + [f"{name} is gone" for name in first if name not in last]


def max_mib(device: str) -> dict[str, float]:
    """Return the bounds on a device; what a model takes beside a GPU is not bounded here."""
    if device == "cuda":
        return {name: bound for name, bound in MAX_MIB.items() if name != "compute"}
    return MAX_MIB | ({"compute": MAX_CPU_MIB} if device == "cpu" else {})


def beyond(memory: list[tuple[int, dict[str, float]]], bounds: Mapping[str, float]) -> list[str]:
    """Name the processes that ever had more in use than the bound of their kind."""
    peaks: dict[str, float] = {}
    for _, used in memory:
        for name, mib in used.items():
            peaks[name] = max(mib, peaks.get(name, 0.0))
    kinds = {name: re.sub(r"[-.]\d+", "", name) for name in peaks}
    return [
        f"{name} had {peak:.0f} MiB of {bounds[kinds[name]]:.0f}"
        for name, peak in peaks.items()
        if peak > bounds.get(kinds[name], inf)
    ] + [f"no {kind} was seen" for kind in bounds if kind not in kinds.values()]


def _shown(tally: Tally) -> list[str]:
    if not tally.num_failed:
        return []
    return [f"{tally.num_failed} did, such as {problem}" for problem in tally.problems[:3]]


def _report_stack(run: Soak, tally: Tally, wall_s: float) -> None:
    run.report.text("## The whole stack, over HTTP")
    run.report.table(
        ["", "count"],
        [
            ["requests", tally.num_ended],
            ["of which left by their client", tally.num_left],
            ["answered to the end", tally.num_stayed],
            ["streams at once", run.arguments.streams],
            ["KV pages, in tokens", run.arguments.kv_tokens],
            ["seconds", round(wall_s, 1)],
            ["requests/s", round(tally.num_ended / wall_s, 1)],
            ["prompt tokens of the answered", tally.prompt_tokens],
            ["of which from the prefix cache", tally.cached_tokens],
            ["output tokens of the answered", tally.output_tokens],
        ],
    )
    names = list(run.memory[-1][1]) if run.memory else []
    run.report.table(
        ["MiB in use after requests", *names],
        [
            [f"{ended:,}", *(round(used.get(name, 0.0), 1) for name in names)]
            for ended, used in run.memory
        ],
    )


def soak_engine(run: Soak, folder: Path) -> None:
    """Soak scheduler, engine and runner in this process."""
    arguments = run.arguments
    settings = ComputeSettings(**run.settings() | {"sim_step_base_s": 0.0})  # type: ignore[arg-type]
    engine = EngineSoak(folder, run.mix(), settings)
    before_mib = rss_mib(os.getpid())
    began_s = time.monotonic()
    said = 0

    def on_step(tally: EngineTally) -> bool:
        nonlocal said
        if tally.num_sequences // 5000 > said:
            said = tally.num_sequences // 5000
            run.say(
                f"in process: {tally.num_sequences} sequences, {tally.num_steps} steps, "
                f"{engine.stats().preemptions_total} preemptions"
            )
        return not run.out_of_time()

    engine.run(run.numbers(), arguments.streams, run.keeps().__contains__, on_step)
    wall_s = time.monotonic() - began_s
    tally, stats = replace(engine.tally), engine.stats()
    left = engine.leftovers()
    num_kept = len(tally.kept)
    differing = engine.ask_alone()
    left += engine.leftovers()
    grown_mib = rss_mib(os.getpid()) - before_mib
    engine.close()
    run.report.text("## Scheduler, engine and runner alone")
    run.report.table(
        ["", "count"],
        [
            ["sequences", tally.num_sequences],
            ["of which aborted", tally.num_aborted],
            ["steps", tally.num_steps],
            ["preemptions", stats.preemptions_total],
            ["prompt tokens", stats.prompt_tokens_total],
            ["of which from the prefix cache", stats.cached_tokens_total],
            ["output tokens", tally.output_tokens],
            ["seconds", round(wall_s, 1)],
            ["MiB more in use at the end", round(grown_mib, 1)],
        ],
    )
    run.check("no sequence failed, each with one end and no gap", tally.problems[:3])
    run.check("every table empty and every page free", left)
    run.check("sequences were preempted", [] if stats.preemptions_total else ["none was"])
    _check_repeats(run, num_kept, differing)
    run.end_section()


def _check_repeats(run: Soak, count: int, differing: list[int]) -> None:
    what = f"{count} answers asked for again, alone, are the same"
    found = [f"{len(differing)} differ, such as request {differing[0]}"] if differing else []
    if run.arguments.deterministic:
        run.check(what, found)
    else:  # the shape of a batch decides the last bits of its products
        run.checks.append(f"- {what}: {'; '.join(found) or 'yes'} (equality is not promised here)")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, default=20000)
    add("--device", default="sim", choices=("sim", "cpu", "cuda"))
    add("--model", choices=list(SHAPES), help="(default: llama-1b on cuda, else tiny)")
    add("--dtype", default="auto")
    add("--streams", type=int, default=96, help="requests at once")
    add("--kv-tokens", type=int, default=2048, help="what the KV cache holds")
    add("--routers", type=int, default=1)
    add("--seed", type=int, default=1)
    add("--repeated", type=int, default=300, help="answers that are asked for again, alone")
    add("--deterministic", action="store_true", help="they must be the same (always so on sim)")
    add("--in-process", action="store_true", help="only scheduler, engine and runner")
    add("--stack-only", action="store_true", help="only the whole stack")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="a [compute] setting")
    add("--time-limit", type=float, default=540.0, help="no request begins after so many seconds")
    add(
        "--out",
        type=Path,
        help="where the page goes (default: results/soak*.md)",
    )
    arguments = parser.parse_args(given)
    arguments.model = arguments.model or ("llama-1b" if arguments.device == "cuda" else "tiny")
    arguments.deterministic = arguments.deterministic or arguments.device == "sim"
    name = "soak" if arguments.device == "sim" else f"soak_{arguments.device}"
    arguments.out = arguments.out or RESULTS / f"{name}.md"
    return arguments


def main() -> int:
    """Soak, and write the page; 1 if something was not as it should be."""
    arguments = parse()
    report = Report(
        "soak",
        f"{arguments.requests:,} requests with random disconnects, preemptions and prefix hits",
        "Nothing may be left of them, and none of those that stayed may fail.",
    )
    report.text(f"- device: {name_of_device(arguments.device)}, model {arguments.model}")
    run = Soak(arguments, report)
    with scratch_folder() as scratch:
        folder = make_folder(scratch / arguments.model, SHAPES[arguments.model])
        if not arguments.in_process:
            soak_stack(run, folder)
        if not arguments.stack_only:
            soak_engine(run, folder)
    arguments.out.write_text(report.page)
    print("\n" + report.page)
    for problem in run.failed:
        print(f"FAILED {problem}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
