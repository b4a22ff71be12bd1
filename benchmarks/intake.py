"""What a prompt costs the thread that drives the device, from its message to the packed step.

    python -m benchmarks.intake [--markdown FILE]

Stages, in the order in which compute goes through them: `decode` reads the frames of a `Generate`,
`add` makes a request of it and puts it in line, `plan` admits it (prefix lookup, pages, page table)
with a first chunk of at most 8,192 tokens, `pack` writes that step as the device gets it. `known`
is the plan of the same prompt once all of it is in the prefix tree, and what its end costs is
`release`. `tuples` is what the ids alone took when they were a tuple: made, looked through for
bounds, packed again, in the same run. All are the thread's own processor time: the best of the
rounds, and for the whole way from decode to pack the median, too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scheduler import DETOKENIZER, PAGE_TOKENS, answer
from common.link.codec import Codec
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import ComputeInbox, Generate
from common.messages.sampling import SamplingParams
from services.compute.kv.memory import KVGroup
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.uploads import (
    MAX_PAGE_ENTRIES,
    NO_SLOT_ROWS,
    StepPacker,
    packed_size,
)
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings

VOCAB_SIZE = 1 << 17
MAX_PROMPT = 1 << 17
CHUNK_TOKENS = 8192
SIZES = (1024, 8192, 32_768, 100_000, 131_072)
STAGES = ("decode", "add", "plan", "pack", "known", "release")
TOTAL = "decode to pack"
COMPUTE = Address("inproc://compute", "0")


def make_scheduler() -> Scheduler:
    """A scheduler with room for one of the longest prompts."""
    spec = RunnerSpec(
        vocab_size=VOCAB_SIZE,
        max_model_len=2 * MAX_PROMPT,
        eos_token_ids=(2,),
        kv_groups=(KVGroup("full", 1, PAGE_TOKENS, 1),),
        num_pages=2 * MAX_PROMPT // PAGE_TOKENS,
        num_host_pages=0,
        max_num_seqs=64,
        max_step_tokens=CHUNK_TOKENS + 64,
        stall_after_s=1.0,
    )
    settings = SchedulerSettings(max_num_seqs=64, max_prefill_tokens=CHUNK_TOKENS)
    return Scheduler(spec, settings, DecodeFirst())


def make_frames(counter: int, ids: array[int]) -> list[bytes]:
    """A prompt's message, as it comes over the link."""
    message = Generate(
        attempt=AttemptId("router", counter),
        detokenizer=DETOKENIZER,
        prompt_ids=ids.tobytes(),
        output_ids=int32s(),
        sampling=SamplingParams(max_tokens=1, seed=counter),
        header=b"x" * 200,
        admitted_at_s=0.0,
    )
    return Codec(ComputeInbox).encode(message, COMPUTE, DETOKENIZER)


class Intake:
    """One prompt after the other through a scheduler of its own, and the times of each stage."""

    def __init__(self, num_ids: int) -> None:
        draw = np.random.default_rng(num_ids)
        self._ids = int32s(draw.integers(3, VOCAB_SIZE, num_ids).tolist())
        self._codec = Codec(ComputeInbox)
        self._draw = draw
        size = packed_size(64, CHUNK_TOKENS + 64, MAX_PAGE_ENTRIES, 64)
        self._upload = np.zeros(size, dtype=np.int32)
        self._times_ms: dict[str, list[float]] = defaultdict(list)

    def run(self) -> None:
        """The prompt comes, is computed, ends; comes again and finds all of it; and ends."""
        scheduler = make_scheduler()
        self._admit(scheduler, make_frames(1, self._ids), "plan")
        self._finish(scheduler)
        self._admit(scheduler, make_frames(2, self._ids), "known")
        self._timed("release", lambda: scheduler.abort(AttemptId("router", 2), 0.0))
        self._timed("tuples", self._as_tuples)

    def _admit(self, scheduler: Scheduler, frames: list[bytes], stage: str) -> None:
        envelope = self._timed("decode", lambda: self._codec.decode(frames))
        self._timed("add", lambda: scheduler.add_request(envelope.message, 0.0))
        self._plan = self._timed(stage, lambda: scheduler.plan(0.0))
        packer = StepPacker(64)
        self._timed("pack", lambda: packer.pack(self._plan, NO_SLOT_ROWS, self._upload))
        if stage == "plan":
            self._times_ms[TOTAL].append(sum(self._times_ms[name][-1] for name in STAGES[:4]))

    def _finish(self, scheduler: Scheduler) -> None:
        plan = self._plan
        while plan is not None:
            scheduler.commit(plan, answer(plan, self._draw), 0.0)
            plan = scheduler.plan(0.0)
        scheduler.drain_outputs()

    def _as_tuples(self) -> bytes:
        ids = tuple(self._ids)
        if min(ids) < 0 or max(ids) >= VOCAB_SIZE:
            raise ValueError("an id beyond the vocabulary")
        return array("i", ids).tobytes()

    def _timed(self, stage: str, work: Callable[[], Any]) -> Any:
        began_ns = time.thread_time_ns()
        result = work()
        self._times_ms[stage].append((time.thread_time_ns() - began_ns) / 1e6)
        return result

    def row(self) -> str:
        """One line of the table."""
        best_ms = {stage: min(times_ms) for stage, times_ms in self._times_ms.items()}
        stages = " | ".join(f"{best_ms[stage]:.3f}" for stage in STAGES)
        total_ms = best_ms[TOTAL]
        return (
            f"| {len(self._ids)} | {stages} | **{total_ms:.3f}** "
            f"| {statistics.median(self._times_ms[TOTAL]):.3f} | {best_ms['tuples']:.3f} "
            f"| {total_ms / (total_ms + best_ms['tuples']):.2f} |"
        )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    lines = [
        f"| ids | {' | '.join(STAGES)} | {TOTAL} | median | tuples | ratio |",
        "|---" * (len(STAGES) + 5) + "|",
    ]
    gc.disable()  # as the compute service does once it is ready
    for num_ids in SIZES:
        intake = Intake(num_ids)
        for _ in range(arguments.rounds):
            intake.run()
            gc.collect()
        lines.append(intake.row())
    table = "\n".join(lines)
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
