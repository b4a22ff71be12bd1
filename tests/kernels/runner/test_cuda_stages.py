"""Stages that run kernels say, with drafts, what one process says that runs them, without."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.stages import Stages
from services.compute.models import kernel_decoder
from services.compute.runner.cuda.load import load_on
from services.compute.runner.cuda.stream import DeviceStream, GraphStream
from services.compute.runner.executor import Executor
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.host_stream import HostStream
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, load_runner
from tests.kernels.runner.split_executor import SplitExecutor, thread_ranks
from tests.unit.compute.distributed.served import GREEDY, PROMPTS
from tests.unit.compute.distributed.stage_memory import MemoryStages, StagesHere
from tests.unit.compute.engine_server import Server
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

NAMES = FAMILIES if ON_GPU else ("gemma 2", "qwen3 moe")
"""Norms behind parts, tied heads and windows; experts that are not added up where a stage ends."""

DRAFTING = SETTINGS.model_copy(
    update={"speculative_config": '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'}
)


class InTurn:
    """An executor whose stream is the thread's while it is called."""

    def __init__(self, executor: Any, stream: torch.cuda.Stream) -> None:
        self._executor = executor
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)

        def call(*arguments: Any) -> Any:
            with torch.cuda.stream(self._stream):
                return method(*arguments)

        return call


def said(runner: PackingRunner, settings: ComputeSettings) -> Server:
    """A greedy text with scores of its prompt, and a sampled one that mostly repeats one word."""
    server = Server(runner, settings)
    scored = replace(GREEDY, max_tokens=2, num_prompt_logprobs=1)
    server.ask(0, PROMPTS[0][:9], scored)
    few_words = replace(GREEDY, max_tokens=8, temperature=0.8, logit_bias=((5, 40.0), (9, 37.0)))
    server.ask(1, [9, 5, 5, 5, 5], few_words)
    server.run()
    return server


def check(load: Callable[..., Executor], folder: Path, device: torch.device) -> None:
    """Tokens and logprobs are those of one process."""
    stages = StagesHere(folder, DRAFTING, 2, load)
    staged = said(PackingRunner(stages.executor), DRAFTING)
    stages.executor.close()
    one = said(load_runner(folder, SETTINGS, device), SETTINGS)
    assert staged.tokens == one.tokens
    assert staged.scheduler.stats().accepted_drafts_total > 0
    for counter, rows in one.logprobs.items():
        found, expected = (
            np.array([row.top_logprobs for row in each])
            for each in (staged.logprobs[counter], rows)
        )
        assert np.allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_say_what_one_process_says(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    family.save(make_random(family.model()), tmp_path)

    def load(folder: Path, settings: ComputeSettings, stages: Stages) -> Executor:
        stream: DeviceStream = GraphStream(device) if ON_GPU else HostStream()
        executor = load_on(folder, settings, device, stream, stages=stages)
        return InTurn(executor, torch.cuda.current_stream()) if ON_GPU else executor

    check(load, tmp_path, device)


@pytest.mark.skipif(ON_GPU, reason="ranks have a GPU each, and this is one process")
def test_stages_of_two_ranks_say_what_one_process_says(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_decoder, "kernel_ranks", thread_ranks)
    family = FAMILIES["qwen3 moe"]
    family.save(make_random(family.model(num_hidden_layers=2)), tmp_path)
    between: list[deque[Tensor]] = [deque(), deque()]  # of ranks 1

    def load(folder: Path, settings: ComputeSettings, stages: Stages) -> Any:
        by_rank = stages, MemoryStages(stages.number, 2, between)
        return SplitExecutor(folder, settings, device, 2, by_rank)

    check(load, tmp_path, device)
