"""The eager runner gives what transformers gives: the logits of every family, and the tokens of
each kind of cache however the steps are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.compute.config import ComputeSettings
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.runner_scenarios import (
    COUNT,
    PAGE_TOKENS,
    PROMPTS,
    RunnerScenarios,
)
from tests.unit.compute.tiny_models import (
    OF_EVERY_CACHE,
    VARIANTS,
    greedy_ids,
    make_model,
    save_model,
)

SETTINGS = ComputeSettings(
    device="cpu",
    dtype="float32",
    page_tokens=PAGE_TOKENS,
    max_num_seqs=8,
    max_batched_token_mem=2048,
    swap_space=0.01,
    num_threads=1,
)


Family = tuple[Path, PreTrainedModel, list[list[int]]]


@pytest.fixture(scope="module", params=OF_EVERY_CACHE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    model = make_model(request.param)
    folder = save_model(model, tmp_path_factory.mktemp(request.param))
    return folder, model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
def expected(family: Family) -> list[list[int]]:
    return family[2]


@pytest.fixture
def hand(family: Family) -> HandScheduler:
    return HandScheduler(load_on_cpu(family[0], SETTINGS), PAGE_TOKENS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    hand = HandScheduler(load_on_cpu(save_model(model, tmp_path), SETTINGS), PAGE_TOKENS)
    sequences = [hand.add(prompt) for prompt in PROMPTS]
    (ticket, _) = hand.launch(*((s, len(s.prompt)) for s in sequences))
    for row, prompt in zip(ticket.launched.logits_SV, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


class TestEagerRunner(RunnerScenarios):
    pass
