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


@pytest.mark.parametrize("chunk", [1, 7, 8, 16])
def test_a_prompt_in_chunks(hand: HandScheduler, family, chunk: int) -> None:
    assert hand.run(hand.add(PROMPTS[3]), COUNT, chunk) == family[2][3]


def test_chunks_of_one_prompt_beside_decoding_others(hand: HandScheduler, family) -> None:
    first, second, third = (hand.add(prompt) for prompt in PROMPTS[1:])
    hand.step((first, len(first.prompt)))
    hand.step((first, 1), (second, 9))
    hand.step((first, 1), (third, 20), (second, 28))
    hand.run_all(COUNT, chunk=11)
    assert [s.output[:COUNT] for s in (first, second, third)] == family[2][1:]


def test_a_shared_prefix_is_not_computed_again(hand: HandScheduler, family) -> None:
    first = hand.add(PROMPTS[3])
    hand.run(first, COUNT)
    again = hand.add(PROMPTS[3], shared=(first, len(PROMPTS[3]) // PAGE_TOKENS))
    assert again.computed == 56
    both = hand.add(PROMPTS[3], shared=(first, 2))
    while len(both.output) < COUNT:
        hand.step(*((s, hand.next_queries(s, 30)) for s in (again, both)))
    assert again.output[:COUNT] == both.output == family[2][3]


def test_a_generated_prefix_is_shared_too(hand: HandScheduler, family) -> None:
    first = hand.add(PROMPTS[2])
    hand.run(first, COUNT)
    longer = PROMPTS[2] + family[2][2][:15]
    again = hand.add(longer, shared=(first, len(longer) // PAGE_TOKENS))
    assert hand.run(again, COUNT - 15) == family[2][2][15:]


def test_a_sequence_goes_on_after_a_round_trip_to_the_host(hand: HandScheduler, family) -> None:
    away, other = hand.add(PROMPTS[2]), hand.add(PROMPTS[3])
    hand.run(away, 9)
    hand.step((other, len(other.prompt)), swap_out=(away,))
    hand.run(other, COUNT)
    assert hand.run(away, COUNT) == family[2][2]
    assert other.output == family[2][3]


def test_a_sequence_goes_on_after_preemption_by_recompute(hand: HandScheduler, family) -> None:
    first = hand.add(PROMPTS[2])
    hand.run(first, 9)
    again = hand.add(PROMPTS[2], output=first.output)
    assert hand.run(again, COUNT, chunk=20) == family[2][2]


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_known(
    hand: HandScheduler, family
) -> None:
    sequences = [hand.add(prompt) for prompt in PROMPTS]
    previous = hand.launch(*((s, len(s.prompt)) for s in sequences))
    for _ in range(COUNT - 1):
        ahead = hand.launch(*((s, 1) for s in sequences))
        hand.finish(previous)
        previous = ahead
    hand.finish(previous)
    assert [s.output for s in sequences] == family[2]


def test_logits_are_those_of_transformers(hand: HandScheduler, family) -> None:
    sequences = [hand.add(prompt) for prompt in PROMPTS]
    (ticket, _) = hand.launch(*((s, len(s.prompt)) for s in sequences))
    for row, prompt in zip(ticket.logits_SV, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = family[1](torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
