"""A run in which every kind of request meets, for recordings."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.executor import Executor
from services.compute.runner.frames import RESULT, Frame
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.recording import FORMAT, Recording, RecordingExecutor
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.generate_requests import generate_request
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.prompt_run import pooled, scored
from tests.unit.compute.token_masks import GRAMMAR_SPEC, MaskingRunner

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=7)
KINDS = (
    GREEDY,
    DRAWN,
    replace(DRAWN, presence_penalty=0.5, repetition_penalty=1.2, frequency_penalty=0.1),
    replace(DRAWN, top_k=9, top_p=0.8, min_p=0.01),
    replace(GREEDY, num_logprobs=3, logit_bias=((5, 2.0),), min_tokens=4, ignore_eos=False),
)


def run_all_kinds(runner: Any, settings: ComputeSettings, host_pages: int) -> tuple[int, int]:
    """Greedy, sampled, penalised, cut, scored, pooled and guided requests, with so few pages that
    some are preempted; returns how many times, and how many were swapped at once."""
    spec = {"num_pages": 9, "num_host_pages": host_pages, "overlaps": True}
    server = Server(Restricted(runner, **spec), settings)
    for number, sampling in enumerate(KINDS):
        server.ask(number, list(range(3 + number, 12 + 3 * number)), sampling)
    server.scheduler.add_request(scored(20, [4, 5, 6, 7, 8, 9], 2), 0.0)
    if runner.spec().pooling:
        server.scheduler.add_request(pooled(21, [9, 8, 7, 6, 5]), 0.0)
    server.scheduler.add_request(generate_request(22, [3, 4, 5], DRAWN, num_choices=2), 0.0)
    server.run()
    _run_guided(runner, settings)
    return server.scheduler.stats().preemptions_total, server.most_swapped


def _run_guided(runner: Any, settings: ComputeSettings) -> None:
    """Some tokens under masks, one whose mask is late, and the same one again."""
    masking = MaskingRunner(runner, lambda slot, index: late.pop(index, [30, 31 + index]))
    late: dict[int, None] = {1: None}
    hand = HandScheduler(masking, settings.page_tokens)
    guided = hand.add([7, 8, 9, 10], replace(DRAWN, grammar_spec=GRAMMAR_SPEC))
    hand.run(guided, 2)
    assert masking.skipped == [(guided.slot, 1)]
    guided.output.pop()  # what was drawn without a mask means nothing
    guided.computed -= 1
    tokens = hand.run(guided, 5)
    assert all(token in (30, 31 + index) for index, token in enumerate(tokens))


def record(
    executor: Executor, folder: Path, model: Path, settings: ComputeSettings, host_pages: int = 20
) -> tuple[Path, int, int]:
    """Run all kinds on an executor; the recording's file, and what `run_all_kinds` returns."""
    recording = RecordingExecutor.begin(
        executor, model, settings.model_copy(update={"record_dir": str(folder)})
    )
    counted = run_all_kinds(PackingRunner(recording), settings, host_pages)
    recording.close()
    (file,) = folder.iterdir()
    return file, *counted


def frames_of(file: Path) -> list[Frame]:
    return list(Recording(file).frames())


def with_another_token(file: Path, number: int) -> bytes:
    """The recording's bytes, with another token in the last sample of a result."""
    out = io.BytesIO()
    with file.open("rb") as source:
        out.write(source.readline() + source.readline())
    results = 0
    for kind, ints in frames_of(file):
        ints = ints.copy()
        if kind == RESULT:
            results += 1
            if results == number:
                ints[-1] += 1
        out.write(kind.to_bytes(4, "little") + len(ints).to_bytes(4, "little") + ints.tobytes())
    assert out.getvalue().startswith(FORMAT)
    return out.getvalue()
