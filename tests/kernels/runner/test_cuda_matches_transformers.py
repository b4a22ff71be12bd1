"""The CUDA runner gives what transformers gives: in every family on a GPU, and in Triton's
interpreter for one family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, SIZES, load_runner
from tests.unit.compute import runner_scenarios
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.runner_scenarios import (
    COUNT,
    PAGE_TOKENS,
    PROMPTS,
    MixedSteps,
    RunnerScenarios,
)
from tests.unit.compute.tiny_models import VARIANTS, greedy_ids, make_model, save_model


@pytest.fixture(scope="module", params=list(VARIANTS) if ON_GPU else ["qwen3"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel, list[list[int]]]:
    model = make_model(request.param, **SIZES)
    folder = save_model(model, tmp_path_factory.mktemp(request.param))
    return folder, model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def count(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens the scenarios generate."""
    count = COUNT if ON_GPU else 4
    monkeypatch.setattr(runner_scenarios, "COUNT", count)
    return count


@pytest.fixture
def expected(family: tuple[Path, PreTrainedModel, list[list[int]]], count: int) -> list[list[int]]:
    return [ids[:count] for ids in family[2]]


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "batch_invariant"])
def runner(family, request: pytest.FixtureRequest, device: torch.device) -> PackingRunner:
    settings = SETTINGS.model_copy(
        update={"batch_invariant": request.param, "page_tokens": PAGE_TOKENS}
    )
    return load_runner(family[0], settings, device)


@pytest.fixture
def hand(runner) -> HandScheduler:
    return HandScheduler(runner, PAGE_TOKENS)


# The interpreter takes half a second a step.
class TestCudaRunner(RunnerScenarios if ON_GPU else MixedSteps):
    pass
