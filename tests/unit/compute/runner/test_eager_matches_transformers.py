"""Float32 greedy decoding gives what transformers gives, however the steps are cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.compute.config import ComputeSettings
from services.compute.runner.eager import EagerRunner
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.tiny_models import VARIANTS, VOCAB_SIZE, greedy_ids, make_model, save_model

PAGE_TOKENS = 8
COUNT = 24
SETTINGS = ComputeSettings(
    device="cpu",
    dtype="float32",
    page_tokens=PAGE_TOKENS,
    max_num_seqs=8,
    max_batched_token_mem=2048,
    swap_space=0.01,
    num_threads=1,
)


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length, length) for length in (5, 8, 37, 61)]


@pytest.fixture(scope="module", params=list(VARIANTS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel, list[list[int]]]:
    model = make_model(request.param)
    folder = save_model(model, tmp_path_factory.mktemp(request.param))
    return folder, model, [greedy_ids(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture
def hand(family: tuple[Path, PreTrainedModel, list[list[int]]]) -> HandScheduler:
    return HandScheduler(EagerRunner.load(family[0], SETTINGS), PAGE_TOKENS)


def test_a_sequence_alone(hand: HandScheduler, family) -> None:
    for prompt, expected in zip(PROMPTS, family[2], strict=True):
        assert hand.run(hand.add(prompt), COUNT) == expected


def test_sequences_of_different_lengths_together(hand: HandScheduler, family) -> None:
    sequences = [hand.add(prompt) for prompt in PROMPTS]
    hand.run_all(COUNT)
    assert [s.output for s in sequences] == family[2]
