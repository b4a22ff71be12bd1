"""Which prompts pass the tokenizer by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.messages.arrays import int32s
from common.messages.sampling import SamplingParams
from common.messages.tokenize import IdsPrompt, OutputRules, TextPrompt, Tokenize, TokenLimits
from services.router.first_stage import first_stage
from tests.unit.tokenizer.requests import address, request

LIMITS = TokenLimits(max_model_len=20, max_input_length=12, max_output_length=10, vocab_size=100)
FEW = SamplingParams(max_tokens=10, seed=1)


def ids_request(*ids: int, sampling: SamplingParams = FEW, **more: Any) -> Tokenize:
    prompt = IdsPrompt(int32s(ids))
    return replace(request(1, prompt=prompt, sampling=sampling, limits=LIMITS), **more)


@pytest.mark.parametrize(
    "message",
    [
        ids_request(0, 99),
        ids_request(*[5] * 10),
        ids_request(*[5] * 12, sampling=replace(FEW, max_tokens=8)),
        ids_request(*[5] * 10, truncate_to=10),
        ids_request(*[5] * 12, sampling=replace(FEW, max_tokens=0), pooling=True),
        ids_request(*[5] * 100_000, limits=TokenLimits(0, 0, 0, 100)),
    ],
)
def test_ids_that_fit_go_straight_to_compute(message: Tokenize) -> None:
    station, _ = first_stage(message)
    assert station == address("compute")


@pytest.mark.parametrize(
    "message",
    [
        ids_request(5, prompt=TextPrompt("five")),
        ids_request(*[5] * 11),
        ids_request(*[5] * 13, sampling=replace(FEW, max_tokens=1)),
        ids_request(5, sampling=replace(FEW, max_tokens=11)),
        ids_request(5, sampling=replace(FEW, max_tokens=0)),
        ids_request(*[5] * 10, truncate_to=9),
        ids_request(*[5] * 13, pooling=True),
        ids_request(5, rules=OutputRules(allowed_token_ids=(7,))),
    ],
)
def test_all_else_goes_to_the_tokenizer_which_refuses_and_cuts(
    message: Tokenize,
) -> None:
    assert first_stage(message) == (address("tokenizer"), message)
