"""The CUDA runner gives what transformers gives: in every family on a GPU, and in Triton's
interpreter for one family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.compute.runner.cuda.runner import CudaRunner
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, SIZES, load_runner
from tests.unit.compute import runner_scenarios
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.runner_scenarios import (  # noqa: F401
    COUNT,
    PAGE_TOKENS,
    PROMPTS,
    test_a_generated_prefix_is_shared_too,
    test_a_prompt_in_chunks,
    test_a_sequence_alone,
    test_a_sequence_goes_on_after_a_round_trip_to_the_host,
    test_a_sequence_goes_on_after_preemption_by_recompute,
    test_a_shared_prefix_is_not_computed_again,
    test_chunks_of_one_prompt_beside_decoding_others,
    test_sequences_of_different_lengths_together,
    test_the_next_step_is_launched_before_the_last_ones_tokens_are_known,
)
from tests.unit.compute.tiny_models import VARIANTS, greedy_ids, make_model, save_model

if not ON_GPU:  # the interpreter takes half a second a step: one scenario has all kinds of steps
    del test_a_generated_prefix_is_shared_too
    del test_a_prompt_in_chunks
    del test_a_sequence_alone
    del test_a_sequence_goes_on_after_a_round_trip_to_the_host
    del test_a_sequence_goes_on_after_preemption_by_recompute
    del test_a_shared_prefix_is_not_computed_again
    del test_sequences_of_different_lengths_together
    del test_the_next_step_is_launched_before_the_last_ones_tokens_are_known


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
    count = COUNT if ON_GPU else 6
    monkeypatch.setattr(runner_scenarios, "COUNT", count)
    return count


@pytest.fixture
def expected(family: tuple[Path, PreTrainedModel, list[list[int]]], count: int) -> list[list[int]]:
    return [ids[:count] for ids in family[2]]


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "batch_invariant"])
def runner(family, request: pytest.FixtureRequest, device: torch.device) -> CudaRunner:
    settings = SETTINGS.model_copy(
        update={"batch_invariant": request.param, "page_tokens": PAGE_TOKENS}
    )
    return load_runner(family[0], settings, device)


@pytest.fixture
def hand(runner) -> HandScheduler:
    return HandScheduler(runner, PAGE_TOKENS)
