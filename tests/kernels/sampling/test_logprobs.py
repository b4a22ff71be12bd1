"""Logprobs of the drawn and the most likely ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.logprobs import (
    CHOSEN,
    NUM_SCORED,
    RANK,
    RESULT_WORDS,
    TOP_IDS,
    TOP_LOGPROBS,
    LogprobScratch,
    logprobs,
    logprobs_reference,
)
from tests.kernels.sampling_step import SamplingStep, make_step, random_logits

PLAIN = SamplingParams(max_tokens=100, seed=1)
SETTINGS = [replace(PLAIN, num_logprobs=count) for count in (20, -1, 0, 4)]


def run(step: SamplingStep, logits: torch.Tensor, token: int) -> torch.Tensor:
    """Results, poisoned before."""
    rows, vocab_size = logits.shape
    result = torch.full((rows, RESULT_WORDS), -7, dtype=torch.int32, device=logits.device)
    result[:, 0] = token
    scratch = LogprobScratch.make(rows, vocab_size, logits.device)
    logprobs(logits, step.rows, scratch, result)
    return result


@pytest.mark.parametrize("vocab_size", [23, 4096, 9001])
def test_values_and_ids_are_the_references(vocab_size: int, device: torch.device) -> None:
    step = make_step(SETTINGS, vocab_size, device)
    for spread in (0.5, 20.0):
        logits = random_logits(4, vocab_size, vocab_size, device, spread)
        result = run(step, logits, 5)
        expected = torch.full_like(result, -7)
        expected[:, 0] = 5
        logprobs_reference(logits.double(), step.rows, expected)
        floats = [CHOSEN, *range(TOP_LOGPROBS, RESULT_WORDS)]
        ids = [0, 1, NUM_SCORED, RANK, *range(TOP_IDS, TOP_LOGPROBS)]
        assert result[:, ids].tolist() == expected[:, ids].tolist()
        ours, theirs = (some[:, floats].contiguous() for some in (result, expected))
        written = theirs != -7
        assert torch.equal(ours != -7, written)
        difference = ours.view(torch.float32)[written] - theirs.view(torch.float32)[written]
        assert float(difference.abs().max()) < 1e-5 * spread


def test_of_equals_the_lower_id_is_first(device: torch.device) -> None:
    step = make_step(SETTINGS[:1], 9001, device)
    logits = torch.zeros(1, 9001, device=device)
    logits[0, [8000, 17, 5000]] = 1.0
    assert run(step, logits, 0)[0, TOP_IDS : TOP_IDS + 5].tolist() == [17, 5000, 8000, 0, 1]


def test_a_row_is_the_same_alone_and_in_company(device: torch.device) -> None:
    step = make_step(SETTINGS, 9001, device)
    logits = random_logits(4, 9001, 3, device)
    together = run(step, logits, 9)
    for row in range(4):
        step.choose([row], [0])
        assert run(step, logits[row : row + 1], 9).tolist() == together[row : row + 1].tolist()
