r"""How long a prompt takes on ranks that share its tokens, against one process.

    python -m benchmarks.context [--tokens N] [--sizes 1x1,2x1,1x2] [--rounds N]
    python -m benchmarks.context --device cuda --dtype auto --shape llama-8b --tokens 131072 \
        --sizes 1x1,2x1 --rounds 2

A size is a number of ranks and of threads of each; threads are the CPU's.

Scheduler, engine and runner as in compute, without HTTP; random weights. On the CPU the processes
of all sizes stay, and each round measures every size once, so that what else the machine does falls
on all of them; GPUs are given from one size to the next.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np
import structlog

from benchmarks.gpu_models import SHAPES, Shape, make_folder
from benchmarks.stack import ROOT
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.device import scheduler_settings
from services.compute.engine import Engine
from services.compute.runner.registry import load_runner
from services.compute.scheduler.outputs import sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 140_000
DETOKENIZER = Address("inproc://detokenizer", "0")
MEDIUM = Shape(512, 1536, 8, 8, 4, 64, tied=True, vocab_size=4096)
"""For the CPU: 27 million weights."""


@dataclass(slots=True)
class Served:
    """A model on so many ranks, in a process that leads them."""

    size: str
    process: subprocess.Popen[str]
    wall_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def wait_until_ready(self) -> None:
        if self._output.readline() != "ready\n":
            raise SystemExit("a process has not started; see what it said above")

    def measure(self, seed: int, keep: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        wall_s, computed_s, token = self._output.readline().split()
        if keep:
            self.wall_s.append(float(wall_s))
            self.computed_s.append(float(computed_s))
            self.tokens.append(token)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(folder: Path, settings: ComputeSettings, num_tokens: int) -> None:
    """For each line, a seed, compute a prompt; say the seconds to its first token, this thread's
    processor time, and the token."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    runner = load_runner(folder, settings)
    scheduler = Scheduler(runner.spec(), scheduler_settings(settings, runner.spec()), DecodeFirst())

    def fail(error: Exception, attempts: object) -> None:
        raise error

    engine = Engine(scheduler, runner, 1, time.monotonic, fail)
    print("ready", flush=True)
    for counter, line in enumerate(sys.stdin):
        prompt = np.random.default_rng(int(line)).integers(3, 1000, num_tokens)
        began_s, computed_s = time.monotonic(), time.thread_time()
        scheduler.add_request(request(counter, prompt), began_s)
        while scheduler.has_work() or engine.num_in_flight:
            if not (engine.launch() and engine.has_room):
                engine.collect(force=True)
        took = time.monotonic() - began_s, time.thread_time() - computed_s
        (output,) = [each for each in sequence_outputs(scheduler.drain_outputs()) if each.token_ids]
        print(*took, output.token_ids[0], flush=True)
    runner.close()


def request(counter: int, prompt: np.ndarray) -> Generate:
    return Generate(
        attempt=AttemptId("bench", counter),
        detokenizer=DETOKENIZER,
        prompt_ids=int32s(prompt.tolist()).tobytes(),
        output_ids=int32s(),
        sampling=SamplingParams(1, seed=0, temperature=0.0, ignore_eos=True),
        header=b"",
        admitted_at_s=0.0,
    )


def settings_of(options: argparse.Namespace, size: str) -> ComputeSettings:
    ranks, threads = map(int, size.split("x"))
    return ComputeSettings(
        device=options.device,
        dtype=options.dtype,
        load_format="dummy",
        prefix_cache=False,
        max_num_seqs=8,
        max_model_len=options.tokens + 16,
        max_batched_token_mem=options.tokens + 64 if options.device == "cpu" else 0,
        num_threads=threads,
        prefill_context_parallel_size=ranks,
    )


def measure_all(folder: Path, options: argparse.Namespace) -> list[Served]:
    """Of each size in turn."""
    sizes = options.sizes.split(",")
    found = []
    for together in [sizes] if options.device == "cpu" else [[size] for size in sizes]:
        with ExitStack() as stack:
            served = [start(folder, size) for size in together]
            for each in served:
                stack.callback(each.close)
                each.wait_until_ready()
            for seed in range(options.rounds + 1):  # the first warms up
                for each in served:
                    each.measure(seed, keep=seed > 0)
        found += served
    return found


def start(folder: Path, size: str) -> Served:
    own = ["--role", size, str(folder)]
    command = [sys.executable, "-m", "benchmarks.context", *sys.argv[1:], *own]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return Served(size, subprocess.Popen(command, text=True, cwd=ROOT, **pipes))


def table(found: Sequence[Served]) -> str:
    lines = [
        "| ranks x threads | first token after s | of the first | leader's processor time s |",
        "|---:|---:|---:|---:|",
    ]
    for each in found:
        ratios = [a / b for a, b in zip(each.wall_s, found[0].wall_s, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        wall_s, computed_s = map(statistics.median, (each.wall_s, each.computed_s))
        lines.append(f"| {each.size} | {wall_s:.3f} | {spread} | {computed_s:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "auto"), default="float32")
    parser.add_argument("--shape", choices=("medium", *SHAPES), default="medium")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sizes", default="1x1,2x1,1x2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        size, folder = options.role
        serve(Path(folder), settings_of(options, size), options.tokens)
        return
    shape = MEDIUM if options.shape == "medium" else SHAPES[options.shape]
    with TemporaryDirectory(prefix="slipstream-") as scratch:
        folder = make_folder(Path(scratch), replace(shape, max_model_len=MAX_MODEL_LEN))
        found = measure_all(folder, options)
    if any(each.tokens != found[0].tokens for each in found):
        print("the first tokens differ:", *(each.tokens for each in found))
    print(table(found))


if __name__ == "__main__":
    main()
