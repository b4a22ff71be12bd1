"""The whole engine on the CUDA runner in float32 greedy: transformers' tokens in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import SETTINGS, load_runner
from tests.unit.compute.engine_scenarios import (
    COUNT,
    PROMPTS,
    EngineScenarios,
    Serve,
    check_broken,
    save_broken,
)
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.tiny_models import VARIANTS, greedy_ids, make_model, save_model

pytestmark = pytest.mark.gpu  # 170 steps of a history are two minutes in the interpreter

ENGINE_SETTINGS = SETTINGS.model_copy(update={"page_tokens": 16})
LARGEST = {"max_num_seqs": 32, "max_prefill_tokens": 512}


@pytest.fixture(scope="module", params=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "batch_invariant"])
def runner(
    model: PreTrainedModel,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    device: torch.device,
) -> PackingRunner:
    folder = save_model(model, tmp_path_factory.mktemp("model"))
    settings = ENGINE_SETTINGS.model_copy(update={"batch_invariant": request.param, **LARGEST})
    return load_runner(folder, settings, device)


@pytest.fixture
def serve(runner: PackingRunner) -> Serve:
    def make(spec: dict[str, Any] | None = None, **settings: Any) -> Server:
        restricted = Restricted(runner, **(spec or {}))
        return Server(restricted, ENGINE_SETTINGS.model_copy(update=settings))

    return make


class TestCudaEngine(EngineScenarios):
    pass


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_replica_with_damaged_weights_says_nothing_wrong_and_knows_it(
    tmp_path: Path, device: torch.device, batch_invariant: bool
) -> None:
    settings = ENGINE_SETTINGS.model_copy(update={"batch_invariant": batch_invariant, **LARGEST})
    check_broken(Server(load_runner(save_broken(tmp_path), settings, device), settings))
