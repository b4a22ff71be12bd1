"""With a quantized KV cache the eager runner gives what transformers gives with rounded keys and
values, whatever happens to pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from services.compute.config import ComputeSettings
from services.compute.runner.model_loader import KV_CACHE_DTYPES
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.quantized_cache import RoundedModel
from tests.unit.compute.runner_scenarios import COUNT, PAGE_TOKENS, PROMPTS, RunnerScenarios
from tests.unit.compute.tiny_models import greedy_ids, make_model, save_model

SETTINGS = ComputeSettings(
    device="cpu",
    dtype="float32",
    page_tokens=PAGE_TOKENS,
    max_num_seqs=8,
    max_batched_token_mem=2048,
    swap_space=0.01,
    num_threads=1,
)
VARIANTS = ("llama", "llama_mha", "mistral_window", "qwen2_window")


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=list(KV_CACHE_DTYPES))
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, dtype: str) -> list[list[int]]:
    rounded = RoundedModel(model, KV_CACHE_DTYPES[dtype])
    return [rounded.greedy_ids(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
def hand(folder: Path, dtype: str) -> HandScheduler:
    settings = SETTINGS.model_copy(update={"kv_cache_dtype": dtype})
    return HandScheduler(load_on_cpu(folder, settings), PAGE_TOKENS)


class TestEagerRunner(RunnerScenarios):
    pass


def test_rounding_is_felt(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """These models are so sensitive to it that the tests above would not pass without it."""
    assert [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS] != expected
