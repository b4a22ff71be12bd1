"""Structured outputs on the CUDA runner: masks go with their step, skipped samples vanish."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.messages.sampling import SamplingParams
from tests.kernels.runner.cuda_runners import SETTINGS, load_runner
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler
from tests.unit.compute.runner_promises import PROMPT
from tests.unit.compute.tiny_models import greedy_ids, make_model, save_model
from tests.unit.compute.token_masks import GRAMMAR_SPEC, MaskingRunner

STRUCTURED = replace(GREEDY, grammar_spec=GRAMMAR_SPEC)


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> HandScheduler:
    folder = save_model(make_model("llama"), tmp_path_factory.mktemp("llama"))
    return HandScheduler(load_runner(folder, SETTINGS, device), SETTINGS.page_tokens)


@pytest.fixture
def runner(hand: HandScheduler) -> object:
    """The runner alone, given back afterwards; sequences of other tests are gone."""
    hand.sequences.clear()
    yield hand.runner
    hand.runner = getattr(hand.runner, "_runner", hand.runner)


def test_structured_rows_take_what_their_masks_allow_and_the_rows_beside_them_anything(
    hand: HandScheduler, runner: object
) -> None:
    allowed = {(1, 0): [150], (1, 1): [9, 40, 41], (1, 2): [198], (2, 0): [3, 4], (2, 1): [7]}
    hand.runner = MaskingRunner(runner, lambda slot, index: allowed.get((slot, index), [5]))
    free = hand.add(PROMPT)
    first = hand.add(PROMPT[:5], STRUCTURED)
    warm = SamplingParams(
        max_tokens=100, seed=3, top_p=0.9, num_logprobs=2, grammar_spec=GRAMMAR_SPEC
    )
    second = hand.add(PROMPT[:3], warm)
    previous = hand.launch(*((s, len(s.prompt)) for s in (free, first, second)))
    for _ in range(2):  # each step's masks are uploaded while the one before may still run
        ahead = hand.launch((free, 1), (first, 1), (second, 1))
        hand.finish(previous)
        previous = ahead
    hand.finish(previous)
    assert free.output == greedy_ids(make_model("llama"), PROMPT, 3)
    assert first.output[0] == 150 and first.output[1] in (9, 40, 41) and first.output[2] == 198
    assert second.output[0] in (3, 4) and second.output[1:] == [7, 5]
    assert all(len(result.logprobs[2][0].top_ids) == 2 for result in hand.results[-3:])


def test_what_a_void_sample_draws_does_not_count(hand: HandScheduler, runner: object) -> None:
    """Penalties would make the second draw another one, had the first been counted."""
    penalised = replace(STRUCTURED, frequency_penalty=1000.0)
    hand.runner = masking = MaskingRunner(runner, lambda slot, index: None)
    sequence = hand.add(PROMPT, penalised)
    hand.step((sequence, len(PROMPT)))
    assert masking.skipped == [(0, 0)]
    sequence.output.clear()
    hand.runner = again = MaskingRunner(runner, lambda slot, index: [50, 51])
    again._structured[0] = True
    sequence.computed -= 1
    hand.step((sequence, 1))
    best = sequence.output[0]
    assert best in (50, 51)
    hand.step((sequence, 1))
    assert sequence.output[1] == 101 - best


def test_a_structured_sample_without_a_mask_is_an_error(
    hand: HandScheduler, runner: object
) -> None:
    hand.runner = masking = MaskingRunner(runner, lambda slot, index: [1])
    masking.sample = runner.sample  # type: ignore[attr-defined, method-assign]
    with pytest.raises(ValueError, match=r"no mask for structured samples \[0\]"):
        hand.step((hand.add(PROMPT, STRUCTURED), len(PROMPT)))
