"""Masks in the CPU's sampler: what they bar is never drawn, and skipped samples leave no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.sampling.sampler import Sampler
from services.compute.step import SlotDelta, TokenMasks
from tests.unit.compute.sampling_slots import take_slots
from tests.unit.compute.token_masks import bits_of

VOCAB_SIZE = 77


def make_sampler(*settings: dict[str, Any]) -> Sampler:
    sampler = Sampler(len(settings), VOCAB_SIZE)
    take_slots(
        sampler,
        [
            SlotDelta(
                slot,
                1,
                SamplingParams(max_tokens=99, seed=slot, grammar_spec=GrammarSpec("x"), **fields),
                0,
                (),
            )
            for slot, fields in enumerate(settings)
        ],
        VOCAB_SIZE,
    )
    return sampler


def make_masks(allowed: dict[int, list[int]], skipped: tuple[int, ...] = ()) -> TokenMasks:
    rows = [bits_of(ids, VOCAB_SIZE) for ids in allowed.values()]
    bits = np.array(rows, dtype=np.int32).reshape(len(rows), -(-VOCAB_SIZE // 32))
    return TokenMasks(np.array(list(allowed), dtype=np.int32), bits, skipped)


def draw(sampler: Sampler, logits: torch.Tensor, index: int, masks: TokenMasks | None) -> list[int]:
    slots = np.arange(len(logits))
    sampled = sampler.sample(logits.clone(), slots, np.full(len(logits), index), masks)
    assert bool(sampled.finite_S.all())
    return list(sampled.tokens_S.tolist())


@given(
    allowed=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.3]),
    min_p=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_only_what_the_mask_allows_is_drawn(
    allowed: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampler = make_sampler(fields, fields)
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 9
    free = draw(sampler, logits, 0, None)
    structured = draw(sampler, logits, 0, make_masks({1: allowed}))
    assert structured[0] == free[0]
    assert structured[1] in allowed


def test_the_best_of_the_allowed_is_the_greedy_choice() -> None:
    sampler = make_sampler({"temperature": 0.0})
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
    assert draw(sampler, logits, 0, make_masks({0: [3, 64, 9]})) == [64]


def test_a_mask_of_everything_changes_nothing() -> None:
    sampler = make_sampler({"temperature": 1.0})
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    everything = make_masks({0: list(range(VOCAB_SIZE))})
    for index in range(20):
        assert draw(sampler, logits, index, everything) == draw(sampler, logits, index, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_void_sample_draws_is_not_counted(temperature: float) -> None:
    fields = {"temperature": temperature, "frequency_penalty": 2.0}
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    first, second = make_sampler(fields, fields), make_sampler(fields, fields)
    everything = list(range(VOCAB_SIZE))
    for index in range(5):
        draw(first, logits, index, make_masks({0: everything}, skipped=(1,)))
        draw(second, logits, index, make_masks({0: everything, 1: everything}))
    expected = draw(make_sampler(fields, fields), logits, 0, None)
    assert draw(first, logits, 0, None)[1] == expected[1]
    counted = [first._penalties._counts_CV.sum(1), second._penalties._counts_CV.sum(1)]
    assert sorted(counted[0].tolist())[-2:] == [1, 6]
    assert sorted(counted[1].tolist())[-2:] == [5, 5]
