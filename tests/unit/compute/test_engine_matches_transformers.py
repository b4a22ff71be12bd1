"""The whole engine in float32 greedy: transformers' tokens, whatever happens to a sequence."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from services.compute.config import ComputeSettings
from services.compute.runner.model_loader import KV_CACHE_DTYPES
from services.compute.runner.packing_runner import PackingRunner
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.engine_scenarios import (
    COUNT,
    NUM_HOST_PAGES,
    PROMPTS,
    EngineScenarios,
    Serve,
    check_broken,
    save_broken,
)
from tests.unit.compute.engine_server import Restricted, Server
from tests.unit.compute.quantized_cache import RoundedModel
from tests.unit.compute.tiny_models import OF_EVERY_CACHE, greedy_ids, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu", dtype="float32", max_num_seqs=32, max_batched_token_mem=2048, swap_space=0.003,
    num_threads=1,
)  # fmt: skip


WITH_SMALLER_CACHES = ["llama fp8", "mistral_window int8", "gpt_oss int8"]
MODELS = [*OF_EVERY_CACHE, *WITH_SMALLER_CACHES]


@cache
def reference(name: str) -> tuple[PreTrainedModel | RoundedModel, list[list[int]]]:
    variant, _, kv_cache_dtype = name.partition(" ")
    model = make_model(variant)
    if not kv_cache_dtype:
        return model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]
    rounded = RoundedModel(model, KV_CACHE_DTYPES[kv_cache_dtype])
    return rounded, [rounded.greedy_ids(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=MODELS)
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PackingRunner]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    variant, _, kv_cache_dtype = request.param.partition(" ")
    save_model(make_model(variant), folder)
    settings = SETTINGS.model_copy(update={"kv_cache_dtype": kv_cache_dtype or "auto"})
    return request.param, load_on_cpu(folder, settings)


@pytest.fixture
def model(runner: tuple[str, PackingRunner]) -> PreTrainedModel | RoundedModel:
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
    num_newcomers = 10  # one of each length; no kernel here has tiles of rows

    @pytest.fixture
    def swap(self, runner: tuple[str, PackingRunner]) -> str:
        """One for each model in turn: pages are copied whatever model wrote them."""
        return list(NUM_HOST_PAGES)[MODELS.index(runner[0]) % len(NUM_HOST_PAGES)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_CACHE_DTYPES])
def test_a_replica_with_damaged_weights_says_nothing_wrong_and_knows_it(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    settings = SETTINGS.model_copy(update={"kv_cache_dtype": kv_cache_dtype})
    check_broken(Server(load_on_cpu(save_broken(tmp_path), settings), settings))
