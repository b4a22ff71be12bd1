"""Masks and steps that are as short as they: `python -m benchmarks.masks [--rounds 3]`.

First the mask worker in this process: what the next masks of 64 sequences take, each of which drew
a random token that its mask allows. Then scheduler, engine and a real mask worker on a virtual
device with the times of a 1B model on a GPU, without a server: 64 sequences, free, structured, and
half and half. The schema is that of `benchmarks.structured`; two checkouts are compared by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from benchmarks.report import Report
from benchmarks.stack import scratch_folder
from benchmarks.structured import NUM_STREAMS, ORDER, WIDE_VOCABULARY, save_wide_folder
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import GrammarSpec, SamplingParams
from common.model_folder import eos_token_ids
from services.compute.config import ComputeSettings
from services.compute.device import grammar_settings, scheduler_settings
from services.compute.engine import Engine
from services.compute.grammar import mask_worker
from services.compute.grammar.backend import GrammarBackend
from services.compute.grammar.manager import GrammarManager, spawn_mask_worker
from services.compute.grammar.protocol import (
    AcceptTokens,
    GrammarSettings,
    MaskMemory,
    StartSequence,
)
from services.compute.runner import sim
from services.compute.scheduler.outputs import Output, sequence_outputs
from services.compute.scheduler.policies import make_policy
from services.compute.scheduler.scheduler import Scheduler
from services.compute.step import Int32Array, StepPlan, StepResult, TokenMasks
from services.compute.step_loop import StepLoop

NUM_STEPS, WARM_UP = 300, 20  # of the worker alone
FORWARD_S, SAMPLING_S = 0.001, 0.0002  # on the device
LAUNCH_S, SEND_S = 60e-6, 100e-6  # what else the host does
SECONDS, WARM_UP_S = 2.0, 1.0  # of each load
MAX_TOKENS = 256
LOADS = {
    "free": [False] * NUM_STREAMS,
    "structured": [True] * NUM_STREAMS,
    "half and half": [False, True] * (NUM_STREAMS // 2),
}
GRAMMAR = GrammarSpec(LLMatcher.grammar_from_json_schema(json.dumps(ORDER)))


def worker_times(folder: Path) -> list[object]:
    """Milliseconds of an order's processor time, least tenth and median, and a digest of masks."""
    eos = eos_token_ids(folder)
    settings = GrammarSettings(
        folder=str(folder), vocab_size=WIDE_VOCABULARY, eos_token_ids=eos, num_slots=NUM_STREAMS
    )
    memory, backend = MaskMemory.create(NUM_STREAMS, WIDE_VOCABULARY), GrammarBackend(settings)
    mask_worker.SLOW_S = 1.0  # none goes to another process, however busy the machine is
    worker = mask_worker.MaskWorker(settings, backend, memory, lambda report: None, 0, None)
    backend.compile(GRAMMAR.grammar)
    for slot in range(NUM_STREAMS):
        worker.take(StartSequence(slot, 1, GRAMMAR, eos, (), 0, False, 1 << 20, ()))
    dice, digest = np.random.default_rng(5), hashlib.sha256()
    forced: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    used_s = []
    for index in range(NUM_STEPS):
        for slot, _, _, _, count, *tokens in memory.named().tolist():
            forced[slot] += tokens[:count]
        bits_NV = np.unpackbits(memory.masks_PNW[0].view(np.uint8), axis=1, bitorder="little")
        digest.update(bits_NV.tobytes())
        rows = [
            (slot, 1, index, ahead.pop(0) if ahead else int(dice.choice(np.flatnonzero(bits_V))))
            for slot, (ahead, bits_V) in enumerate(zip(forced, bits_NV, strict=True))
        ]
        began_s = time.thread_time()
        worker.take(AcceptTokens(np.array(rows, dtype=np.int32)))
        used_s.append(time.thread_time() - began_s)
    memory.close()
    used_ms = 1e3 * np.sort(used_s[WARM_UP:])
    tenth, median = float(used_ms[: len(used_ms) // 10].mean()), float(np.median(used_ms))
    return [tenth, median, digest.hexdigest()[:12]]


def work(seconds: float) -> None:
    """Keep this thread busy, as a launch does."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass


class ShortSteps(sim.SimRunner):
    """Forward passes and samplings one after the other, of random tokens that the masks allow."""

    dice = np.random.default_rng(1)

    def forward(self, plan: StepPlan) -> sim.SimTicket:
        work(LAUNCH_S)
        return super().forward(plan)

    def sample(self, ticket: sim.SimTicket, masks: TokenMasks | None = None) -> sim.SimTicket:
        tokens_S = self.dice.integers(WIDE_VOCABULARY, size=len(ticket.sampled), dtype=np.int32)
        if masks is not None and len(masks.samples):
            tokens_S[masks.samples] = self._allowed(masks.bits)
        work(LAUNCH_S)
        self._busy_until_s = max(ticket.end_s, self._clock()) + SAMPLING_S
        return _Sampled(ticket, self._busy_until_s, tokens_S)  # type: ignore[return-value]

    def result(self, ticket: Any) -> StepResult:
        work(ticket.end_s - self._clock())
        tokens_S1, count = ticket.tokens[:, None], len(ticket.tokens)
        plan, ones, none = ticket.forward.plan, np.ones(count, np.int32), np.zeros(count, np.bool_)
        start_s = ticket.forward.start_s
        return StepResult(
            plan.step_id, tokens_S1, ones, none, device_start_s=start_s, device_end_s=ticket.end_s
        )

    def _allowed(self, bits_GW: Int32Array) -> Int32Array:
        """A token of each mask: within a text nearly any that is drawn."""
        row_G1 = np.arange(len(bits_GW))[:, None]
        drawn_GC = self.dice.integers(WIDE_VOCABULARY, size=(len(bits_GW), 12), dtype=np.int32)
        is_allowed_GC = bits_GW[row_G1, drawn_GC // 32] >> (drawn_GC % 32) & 1
        tokens_G: Int32Array = drawn_GC[row_G1[:, 0], is_allowed_GC.argmax(axis=1)]
        for row in np.flatnonzero(~is_allowed_GC.any(axis=1)).tolist():
            words, number = bits_GW[row].nonzero()[0], int(drawn_GC[row, 0])
            word = int(words[number % len(words)])
            there = [bit for bit in range(32) if int(bits_GW[row, word]) >> bit & 1]
            tokens_G[row] = 32 * word + there[number % len(there)]
        return tokens_G


class _Sampled:
    def __init__(self, forward: sim.SimTicket, end_s: float, tokens: Int32Array) -> None:
        self.forward, self.end_s, self.tokens = forward, end_s, tokens


class Load:
    """So many sequences, each followed by another of its kind, and what they were given."""

    def __init__(self, folder: Path, kinds: list[bool]) -> None:
        settings = ComputeSettings(
            device="sim", max_num_seqs=NUM_STREAMS, max_model_len=1024, speculative_config="off"
        )
        spec = sim.load(folder, settings).spec()
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        self.scheduler = Scheduler(spec, scheduler_settings(settings, spec), policy, None)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:1])
        others = tuple(cores[1:] or cores)
        guide = grammar_settings(folder, settings, spec).model_copy(update={"cores": others})
        self.masks = GrammarManager(guide, spawn_mask_worker, lambda: self.loop.wake())
        runner = ShortSteps(spec, sim.LatencyModel(FORWARD_S, 0.0, 20e-6))
        self.engine = Engine(self.scheduler, runner, 1, time.monotonic, _fail, self.masks)
        self.loop = StepLoop(self.engine, self.scheduler, self._send)
        self.tokens, self._owners, self._cores = [0, 0], list[bool](), cores
        for kind in kinds:
            self._ask(kind)

    def _ask(self, structured: bool) -> None:
        counter = len(self._owners)
        self._owners.append(structured)
        prompt = np.random.default_rng(counter).integers(1000, 30_000, size=16)
        request = Generate(
            AttemptId("benchmark", counter),
            Address("inproc://detokenizer", "0"),
            prompt.astype(np.int32).tobytes(),
            int32s(),
            SamplingParams(
                MAX_TOKENS,
                seed=counter,
                ignore_eos=True,
                grammar_spec=GRAMMAR if structured else None,
            ),
            b"",
            0.0,
        )
        self.scheduler.add_request(request, time.monotonic())

    def _send(self, outputs: list[Output]) -> None:
        for event in sequence_outputs(outputs):
            structured = self._owners[event.attempt.counter]
            self.tokens[structured] += len(event.token_ids)
            if event.ending is not None:
                self._ask(structured)
        work(SEND_S)

    async def run(self) -> tuple[list[float], float]:
        """Tokens per second of both kinds, and samples of each step that were skipped."""
        prepared = asyncio.get_running_loop().create_future()
        self.masks.prepare(GRAMMAR, prepared.set_result)
        assert await prepared is None
        task = asyncio.get_running_loop().create_task(self.loop.run())
        gc.collect()
        gc.disable()
        await asyncio.sleep(WARM_UP_S)
        began_s, before, steps = time.monotonic(), list(self.tokens), self.engine.stats.num_steps
        samples = self.engine.stats.num_samples
        await asyncio.sleep(SECONDS)
        took_s = time.monotonic() - began_s
        drawn = [after - first for after, first in zip(self.tokens, before, strict=True)]
        num_steps = self.engine.stats.num_steps - steps
        num_skipped = self.engine.stats.num_samples - samples - sum(drawn)
        self.loop.close()
        await task
        self.masks.close()
        gc.enable()
        os.sched_setaffinity(0, self._cores)
        return [count / took_s for count in drawn], num_skipped / num_steps


def _fail(error: Exception, _: object) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    numbers = range(parser.parse_args().rounds)
    report = Report("masks", "Masks and steps that are as short as they", __doc__.split("\n\n")[1])
    with scratch_folder() as scratch:
        folder = save_wide_folder(scratch / "wide")
        report.text(f"## {NUM_STREAMS} masks in the mask worker")
        columns = ["processor time, ms", "least tenth", "median", "masks"]
        report.table(columns, [[f"round {each + 1}", *worker_times(folder)] for each in numbers])
        report.text(
            f"## {NUM_STREAMS} rows, a forward pass of {1e3 * FORWARD_S:g} ms and a sampling of "
            f"{1e3 * SAMPLING_S:g}"
        )
        rows: list[list[object]] = []
        for number in numbers:
            free_per_s = 0.0
            for name, kinds in LOADS.items():
                rates, num_skipped = asyncio.run(Load(folder, kinds).run())
                free_per_s = free_per_s or rates[0]
                shares = [
                    rate * NUM_STREAMS / (free_per_s * kinds.count(kind)) if kind in kinds else "-"
                    for kind, rate in zip((False, True), rates, strict=True)
                ]
                rows.append([f"round {number + 1}: {name}", sum(rates), *shares, num_skipped])
        columns = ["", "tokens/s", "free, of as many", "structured, of as many free"]
        report.table([*columns, "skipped of a step"], rows)
    report.write()


if __name__ == "__main__":
    main()
