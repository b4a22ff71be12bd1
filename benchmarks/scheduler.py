"""How long the scheduler takes a step: plan, commit and its messages, without any device.

    python -m benchmarks.scheduler [--markdown FILE]

Steps run one ahead, as the engine takes them. `steady`: all sequences decode and nothing ends.
`mixed`: a sequence ends every other step or so, another begins with a prompt of 256 tokens that is
half known to the prefix tree, and prompts are computed in chunks beside the decode rows. `burst`:
requests that come at once with a long prefix in common; what counts is how many of their prompt
tokens are computed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import deque
from pathlib import Path

import numpy as np

from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.actor import pack_outputs
from services.compute.kv.memory import KVGroup
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import StepPlan, StepResult

PAGE_TOKENS = 16
PROMPT_TOKENS = 256
SHARED_TOKENS = 128
WARM_UP_STEPS = 64
DETOKENIZER = Address("inproc://detokenizer", "0")


def make_scheduler(num_sequences: int) -> Scheduler:
    """A scheduler whose memory holds everything that the benchmark asks for."""
    spec = RunnerSpec(
        vocab_size=1 << 17,
        max_model_len=8192,
        eos_token_ids=(2,),
        kv_groups=(KVGroup("full", 1, PAGE_TOKENS, 1),),
        num_pages=num_sequences * 128 + 256,
        num_host_pages=0,
        max_num_seqs=num_sequences,
        max_step_tokens=8192 + num_sequences,
        stall_after_s=1.0,
    )
    settings = SchedulerSettings(max_num_seqs=num_sequences, max_waiting=4096)
    return Scheduler(spec, settings, DecodeFirst())


def make_request(
    counter: int,
    max_tokens: int,
    rng: np.random.Generator,
    num_shared: int = SHARED_TOKENS,
    num_own: int = PROMPT_TOKENS - SHARED_TOKENS,
) -> Generate:
    """A prompt that starts like all others."""
    tail = rng.integers(3, 1 << 17, num_own)
    return Generate(
        attempt=AttemptId("router", counter),
        detokenizer=DETOKENIZER,
        prompt_ids=int32s([*range(3, 3 + num_shared), *tail]).tobytes(),
        output_ids=int32s(),
        sampling=SamplingParams(max_tokens=max_tokens, seed=counter),
        header=b"x" * 200,
        admitted_at_s=0.0,
    )


def answer(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """What a device would say; never EOS."""
    count = len(plan.sample_row)
    return StepResult(
        plan.step_id,
        rng.integers(3, 1 << 17, (count, 1), dtype=np.int32),
        np.ones(count, dtype=np.int32),
        np.zeros(count, dtype=np.bool_),
    )


class Stopwatch:
    """Runs steps and keeps the time of each part, in milliseconds."""

    def __init__(self, scheduler: Scheduler, rng: np.random.Generator) -> None:
        self._scheduler = scheduler
        self._rng = rng
        self._in_flight: deque[StepPlan] = deque()
        self.plan_ms: list[float] = []
        self.commit_ms: list[float] = []
        self.send_ms: list[float] = []

    def step(self) -> None:
        """Plan one ahead, commit the one before."""
        clock = time.perf_counter
        began = clock()
        plan = self._scheduler.plan(0.0)
        planned = clock()
        if plan is not None:
            self._in_flight.append(plan)
            if len(self._in_flight) < 2:
                return
        oldest = self._in_flight.popleft()
        result = answer(oldest, self._rng)
        began_commit = clock()
        self._scheduler.commit(oldest, result, 0.0)
        committed = clock()
        pack_outputs(oldest.step_id, self._scheduler.drain_outputs())
        sent = clock()
        self.plan_ms.append((planned - began) * 1e3)
        self.commit_ms.append((committed - began_commit) * 1e3)
        self.send_ms.append((sent - committed) * 1e3)

    def forget(self) -> None:
        """Start measuring afresh."""
        self.plan_ms, self.commit_ms, self.send_ms = [], [], []

    def row(self, name: str, num_sequences: int) -> str:
        """One line of the table: medians; of all three together also mean and p99."""
        parts = zip(self.plan_ms, self.commit_ms, self.send_ms, strict=True)
        together = list(map(sum, parts))
        p99 = statistics.quantiles(together, n=100)[98]
        return (
            f"| {name} | {num_sequences} | {statistics.median(self.plan_ms):.3f} "
            f"| {statistics.median(self.commit_ms):.3f} "
            f"| {statistics.median(self.send_ms):.3f} "
            f"| **{statistics.median(together):.3f}** "
            f"| {statistics.mean(together):.3f} | {p99:.3f} |"
        )


def steady(num_sequences: int, num_steps: int) -> str:
    """All sequences decode."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_sequences)
    for counter in range(num_sequences):
        scheduler.add_request(make_request(counter, 4096, rng), 0.0)
    watch = Stopwatch(scheduler, rng)
    for _ in range(WARM_UP_STEPS):
        watch.step()
    watch.forget()
    for _ in range(num_steps):
        watch.step()
    return watch.row("steady", num_sequences)


def mixed(num_sequences: int, num_steps: int) -> str:
    """Sequences come and go, at the rate that keeps all slots taken."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_sequences)
    watch = Stopwatch(scheduler, rng)
    counter = 0
    for turn in range(num_steps + WARM_UP_STEPS):
        if turn == WARM_UP_STEPS:
            watch.forget()
        stats = scheduler.stats()
        while stats.num_running + stats.num_waiting < num_sequences + 1:
            max_tokens = int(rng.integers(num_sequences, 3 * num_sequences + 1))
            scheduler.add_request(make_request(counter, max_tokens, rng), 0.0)
            counter += 1
            stats = scheduler.stats()
        watch.step()
    return watch.row("mixed", num_sequences)


def burst(num_requests: int, num_shared: int, num_own: int) -> str:
    """Newcomers of one moment with a prefix in common."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(num_requests)
    for counter in range(num_requests):
        scheduler.add_request(make_request(counter, 4, rng, num_shared, num_own), 0.0)
    num_computed, num_steps = 0, 0
    began = time.perf_counter()
    while scheduler.stats().num_waiting and (plan := scheduler.plan(0.0)):
        num_computed += plan.num_tokens - plan.num_decode_rows
        num_steps += 1
        scheduler.commit(plan, answer(plan, rng), 0.0)
    took_ms = (time.perf_counter() - began) * 1e3
    num_given = num_requests * (num_shared + num_own)
    return (
        f"| burst | {num_requests} | {num_shared} + {num_own} | {num_given} | {num_computed} "
        f"| {num_steps} | {took_ms:.1f} |"
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    lines = [
        "| workload | sequences | plan ms | commit ms | send ms | together ms | mean | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    gc.disable()  # as the compute service does once it is ready
    for workload in (steady, mixed):
        lines += [workload(number, arguments.steps) for number in (1, 64, 256, 512)]
    lines += [
        "",
        "| workload | requests | shared + own | prompt tokens | computed | steps | ms |",
        "|---|---|---|---|---|---|---|",
        burst(32, 1024, 64),
        burst(256, 1024, 64),
    ]
    table = "\n".join(lines)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
