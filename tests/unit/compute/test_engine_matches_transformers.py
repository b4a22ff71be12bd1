"""The whole engine in float32 greedy: transformers' tokens, whatever happens to a sequence."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.unit.compute.cpu_runners import load_on_cpu
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

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=32, max_batched_token_mem=2048, swap_space=0.003,
    num_threads=1,
)  # fmt: skip


@cache
def reference(variant: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = make_model(variant)
    return model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=list(VARIANTS))
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PackingRunner]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_model(reference(request.param)[0], folder)
    return request.param, load_on_cpu(folder, SETTINGS)


@pytest.fixture
def model(runner: tuple[str, PackingRunner]) -> PreTrainedModel:
    return reference(runner[0])[0]


@pytest.fixture
def expected(runner: tuple[str, PackingRunner]) -> list[list[int]]:
    return reference(runner[0])[1]


@pytest.fixture
def serve(runner: tuple[str, PackingRunner]) -> Serve:
    """On a runner that is driven a step ahead, as an asynchronous device would be."""

    def make(spec: dict[str, Any] | None = None, **settings: Any) -> Server:
        ahead = Restricted(runner[1], overlaps=True, **(spec or {}))
        return Server(ahead, SETTINGS.model_copy(update={"max_num_seqs": 8, **settings}))

    return make


class TestEagerEngine(EngineScenarios):
    pass


def test_a_replica_with_damaged_weights_says_nothing_wrong_and_knows_it(tmp_path: Path) -> None:
    check_broken(Server(load_on_cpu(save_broken(tmp_path), SETTINGS), SETTINGS))
