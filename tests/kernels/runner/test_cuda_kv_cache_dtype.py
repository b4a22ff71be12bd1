"""With a quantized KV cache the CUDA runner gives what transformers gives with rounded keys and
values: every scenario on a GPU, two in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.compute.runner.model_loader import KV_CACHE_DTYPES
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, SIZES, load_runner
from tests.unit.compute import runner_scenarios
from tests.unit.compute.engine_scenarios import check_broken, save_broken
from tests.unit.compute.engine_server import Server
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.quantized_cache import RoundedModel
from tests.unit.compute.runner_scenarios import (
    COUNT,
    PAGE_TOKENS,
    PROMPTS,
    MixedSteps,
    RunnerScenarios,
)
from tests.unit.compute.tiny_models import make_model, save_model

Case = tuple[str, str, bool]  # variant, dtype, batch_invariant
CASES: list[Case] = [("qwen2_window", "int8", True), ("deepseek_v3", "fp8", False)]
if ON_GPU:
    CASES = [
        (variant, dtype, batch_invariant)
        for variant in ("qwen3", "qwen2_window", "deepseek_v3")
        for dtype in KV_CACHE_DTYPES
        for batch_invariant in (False, True)
    ]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest.fixture(autouse=True)
def count(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens the scenarios generate."""
    count = COUNT if ON_GPU else 4
    monkeypatch.setattr(runner_scenarios, "COUNT", count)
    return count


@pytest.fixture(scope="module")
def texts(case: Case) -> list[list[int]]:
    rounded = RoundedModel(make_model(case[0], **SIZES), KV_CACHE_DTYPES[case[1]])
    return [rounded.greedy_ids(prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
def expected(texts: list[list[int]], count: int) -> list[list[int]]:
    return [ids[:count] for ids in texts]


@pytest.fixture(scope="module")
def runner(
    case: Case, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> PackingRunner:
    variant, dtype, batch_invariant = case
    folder: Path = save_model(make_model(variant, **SIZES), tmp_path_factory.mktemp("model"))
    update = {
        "batch_invariant": batch_invariant,
        "kv_cache_dtype": dtype,
        "page_tokens": PAGE_TOKENS,
    }
    return load_runner(folder, SETTINGS.model_copy(update=update), device)


@pytest.fixture
def hand(runner: PackingRunner) -> HandScheduler:
    return HandScheduler(runner, PAGE_TOKENS)


# The interpreter takes half a second a step.
class TestCudaRunner(RunnerScenarios if ON_GPU else MixedSteps):
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(KV_CACHE_DTYPES))
def test_a_replica_with_damaged_weights_says_nothing_wrong_and_knows_it(
    tmp_path: Path, device: torch.device, dtype: str
) -> None:
    update = {
        "kv_cache_dtype": dtype, "page_tokens": 16, "max_num_seqs": 32, "max_prefill_tokens": 512
    }  # fmt: skip
    settings = SETTINGS.model_copy(update=update)
    check_broken(Server(load_runner(save_broken(tmp_path), settings, device), settings))
