"""How fast a real model of about 100 M parameters runs on the CPU, against transformers.

    python -m benchmarks.cpu_model [--rounds N] [--threads N]

Scheduler and eager runner in one process, driven as the engine drives them; transformers'
`generate` in the same process with the same weights, dtype, threads and greedy decoding. Each
round measures every case once, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.report import Report
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.eager import load_eager
from services.compute.runner.packing_runner import PackingRunner
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings

VOCAB_SIZE = 32_000
PROMPT_TOKENS = 128
NEW_TOKENS = 48
STREAMS = (1, 4, 16)
SHARED_TOKENS, OWN_TOKENS = 512, 32
DETOKENIZER = Address("inproc://detokenizer", "0")


@dataclass(frozen=True, slots=True)
class Shape:
    """One model to measure."""

    name: str
    num_kv_heads: int

    def save(self, folder: Path) -> Path:
        """Random weights in bfloat16, saved by transformers."""
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=2048,
        )
        torch.manual_seed(7)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        return folder


SHAPES = (Shape("grouped heads (12 query, 4 kv)", 4), Shape("full heads (12 query, 12 kv)", 12))


class Ours:
    """Scheduler and runner, one step after the other."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        settings = ComputeSettings(
            device="cpu",
            dtype="bfloat16",
            max_num_seqs=max(STREAMS),
            max_batched_token_mem=max(STREAMS) * 1024,
            num_threads=num_threads,
        )
        self._runner = PackingRunner(load_eager(folder, settings))
        self._scheduler = Scheduler(
            self._runner.spec(), SchedulerSettings(max_prefill_tokens=512), DecodeFirst()
        )
        self._rng = np.random.default_rng(11)
        self._counter = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Ids that no request had before."""
        ids: list[int] = self._rng.integers(3, VOCAB_SIZE, num_tokens).tolist()
        return ids

    def step_s(self, num_streams: int) -> float:
        """Median seconds of a step in which this many streams decode, and nothing else."""
        for _ in range(num_streams):
            self._add(self.prompt(PROMPT_TOKENS), NEW_TOKENS)
        periods = []
        while self._scheduler.has_work():
            began_s = time.perf_counter()
            rows, decoding = self._step()
            if rows == decoding == num_streams:
                periods.append(time.perf_counter() - began_s)
        return statistics.median(periods)

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from a request's arrival to its first token."""
        began_s = time.perf_counter()
        self._add(prompt, 1)
        while self._scheduler.has_work():
            self._step()
        return time.perf_counter() - began_s

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        self._counter += 1
        sampling = SamplingParams(max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self._scheduler.add_request(
            Generate(
                attempt=AttemptId("bench", self._counter),
                detokenizer=DETOKENIZER,
                prompt_ids=int32s(prompt).tobytes(),
                output_ids=int32s(),
                sampling=sampling,
                header=b"",
                admitted_at_s=0.0,
            ),
            time.monotonic(),
        )

    def _step(self) -> tuple[int, int]:
        plan = self._scheduler.plan(time.monotonic())
        if plan is None:
            raise RuntimeError("the scheduler has work and plans nothing")
        result = self._runner.result(self._runner.sample(self._runner.forward(plan)))
        self._scheduler.commit(plan, result, time.monotonic())
        self._scheduler.drain_outputs()
        return plan.num_rows, plan.num_decode_rows


class Transformers:
    """`generate` with its defaults: sdpa attention and a dynamic cache."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def token_s(self, prompt: list[int]) -> float:
        """Seconds per token of one stream, its prompt taken off."""
        return (self._seconds(prompt, NEW_TOKENS) - self._seconds(prompt, 1)) / (NEW_TOKENS - 1)

    def _seconds(self, prompt: list[int], count: int) -> float:
        ids = torch.tensor([prompt])
        began_s = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count
            )
        return time.perf_counter() - began_s


def measure(shape: Shape, rounds: int, num_threads: int) -> dict[str, list[float]]:
    """Seconds by case, one of each per round; the first round only warms up."""
    with TemporaryDirectory() as scratch:
        folder = shape.save(Path(scratch))
        ours, theirs = Ours(folder, num_threads), Transformers(folder)
        cases: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            prefix = ours.prompt(SHARED_TOKENS)
            took: dict[str, Callable[[], float]] = {
                "transformers": lambda: theirs.token_s(ours.prompt(PROMPT_TOKENS)),
                **{str(n): lambda n=n: ours.step_s(n) for n in STREAMS},
                "cold": lambda p=prefix: ours.first_token_s(p + ours.prompt(OWN_TOKENS)),
                "warm": lambda p=prefix: ours.first_token_s(p + ours.prompt(OWN_TOKENS)),
            }
            for name, run in took.items():
                seconds = run()
                if number:
                    cases.setdefault(name, []).append(seconds)
    return cases


def ratio(cases: dict[str, list[float]], over: str, under: str, factor: float = 1.0) -> float:
    """The median over rounds of one case's time over another's."""
    pairs = zip(cases[over], cases[under], strict=True)
    return round(statistics.median(factor * a / b for a, b in pairs), 2)


def report_on(report: Report, shape: Shape, cases: dict[str, list[float]]) -> None:
    """Add one model's tables."""
    report.text(f"## {shape.name}")
    many = max(STREAMS)
    report.table(
        ["figure (median of ratios within a round)", "measured", "target"],
        [
            ["tokens/s of one stream, over transformers'", ratio(cases, "transformers", "1"), 1],
            [f"tokens/s of {many} streams, over one", ratio(cases, "1", str(many), many), 4],
            [f"time to first token, over that with {SHARED_TOKENS} of its tokens cached",
             ratio(cases, "cold", "warm"), 5],
        ],
    )  # fmt: skip
    medians = {name: 1e3 * statistics.median(values) for name, values in cases.items()}
    report.table(
        ["ms (median)", "step", "tokens/s"],
        [
            ["transformers, 1 stream", medians["transformers"], 1e3 / medians["transformers"]],
            *([f"Slipstream, {n} streams", medians[str(n)], 1e3 * n / medians[str(n)]]
              for n in STREAMS),
            ["first token, cold", medians["cold"], ""],
            ["first token, prefix cached", medians["warm"], ""],
        ],
    )  # fmt: skip


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    report = Report(
        "cpu_model",
        "A real model on the CPU",
        "Targets, with a Llama shape of about 100 M parameters in bfloat16: one stream at least as "
        "fast as `transformers.generate`, 16 streams at least 4 times one, a shared prefix of 512 "
        "tokens makes the time to the first token 5 times shorter.",
    )
    report.text(
        f"torch {torch.__version__} with {arguments.threads} threads, {arguments.rounds} rounds; "
        f"prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones, greedy; 12 layers of width "
        f"768, {VOCAB_SIZE:,} ids."
    )
    for shape in SHAPES:
        report_on(report, shape, measure(shape, arguments.rounds, arguments.threads))
    report.write()


if __name__ == "__main__":
    main()
