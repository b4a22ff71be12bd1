"""Sampling by each slot's settings, alone and in company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.kernels.step.slot_words import MAX_TOP_LOGPROBS
from services.compute.sampling.sampler import Sampled, Sampler
from services.compute.step import SlotDelta, int32_array
from tests.unit.compute.sampling_slots import take_slots

VOCAB_SIZE = 1003
PLAIN = SamplingParams(max_tokens=100, seed=1)
GREEDY = replace(PLAIN, temperature=0.0)


def place(sampler: Sampler, slot: int, sampling: SamplingParams, **known: tuple[int, ...]) -> None:
    stop_ids = known.pop("stop_ids", ())
    ids = {name: int32_array(values) for name, values in known.items()}
    vocab_size = sampler._penalties._vocab_size
    take_slots(sampler, [SlotDelta(slot, 0, sampling, 0, stop_ids, **ids)], vocab_size)


def sampler_of(*all_settings: SamplingParams, vocab_size: int = VOCAB_SIZE) -> Sampler:
    sampler = Sampler(max(16, len(all_settings)), vocab_size)
    for slot, sampling in enumerate(all_settings):
        place(sampler, slot, sampling)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, slots: list[int], indices: list[int]) -> Sampled:
    return sampler.sample(
        logits.clone(), np.array(slots, dtype=np.int64), np.array(indices, dtype=np.int64)
    )


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 3


SETTINGS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 700]),
    top_p=st.sampled_from([0.05, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (4, -5.0), (3, 1.0))]),
    min_tokens=st.sampled_from([0, 3]),
    num_logprobs=st.sampled_from([-1, 0, 4]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(SETTINGS, min_size=1, max_size=9), st.integers(0, 5), st.randoms())
def test_a_rows_token_does_not_change_with_its_batch(
    all_settings: list[SamplingParams], seed: int, random
) -> None:
    logits = random_logits(len(all_settings), seed)
    indices = [random.randrange(5) for _ in all_settings]

    def fresh() -> Sampler:
        sampler = sampler_of()
        for slot, sampling in enumerate(all_settings):
            known = {"prompt_ids": (1, 2, 3), "output_ids": (4, 5, 5), "stop_ids": (6, 7)}
            place(sampler, slot, sampling, **known)
        return sampler

    together = draw(fresh(), logits, list(range(len(all_settings))), indices)
    order = list(range(len(all_settings)))
    random.shuffle(order)
    apart, sampler = order[: len(order) // 2], fresh()
    for some in (apart, order[len(apart) :]):
        again = draw(sampler, logits[some], some, [indices[slot] for slot in some])
        assert again.tokens_S.tolist() == together.tokens_S[some].tolist()
    for slot in order:
        alone = draw(fresh(), logits[slot : slot + 1], [slot], [indices[slot]])
        assert int(alone.tokens_S) == int(together.tokens_S[slot])
        if alone.logprobs:
            assert alone.logprobs[0][0].chosen == together.logprobs[slot][0].chosen


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_large_vocabulary_that_threads_share_changes_nothing(num_rows: int) -> None:
    threads = torch.get_num_threads()
    sampling = replace(PLAIN, top_p=0.99, seed=7)
    logits = random_logits(1, vocab_size=50_003).expand(num_rows, -1)
    try:
        torch.set_num_threads(1)
        sampler = sampler_of(*[sampling] * num_rows, vocab_size=50_003)
        expected = int(draw(sampler, logits[:1], [0], [5]).tokens_S)
        torch.set_num_threads(2)
        together = draw(sampler, logits, list(range(num_rows)), [5] * num_rows)
    finally:
        torch.set_num_threads(threads)
    assert together.tokens_S.tolist() == [expected] * num_rows


def test_greedy_takes_the_first_of_equals_and_so_do_tiny_temperatures() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, [40, 50]] = 9.0
    sampled = draw(sampler_of(GREEDY, replace(PLAIN, temperature=1e-9)), logits, [0, 1], [0, 0])
    assert sampled.tokens_S.tolist() == [40, 40]


def test_draws_follow_the_distribution_after_temperature_and_cuts() -> None:
    count = 20_000
    sampler = sampler_of(*[replace(PLAIN, temperature=0.5, top_k=4, seed=s) for s in range(16)])
    logits = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.1, -1.0]).expand(count, -1)
    sampler = Sampler(16, 6)
    for slot in range(16):
        place(sampler, slot, replace(PLAIN, temperature=0.5, top_k=4, seed=slot))
    numbers = np.arange(count)
    tokens = sampler.sample(logits.clone(), numbers % 16, numbers // 16).tokens_S
    shares = torch.bincount(tokens, minlength=6) / count
    expected = (logits[0, :4] / 0.5).softmax(-1)
    assert float((shares[:4] - expected).abs().max()) < 0.02
    assert shares[4:].tolist() == [0.0, 0.0]


def test_seed_choice_and_index_each_change_the_draw() -> None:
    sampler = Sampler(4, VOCAB_SIZE)
    flat = torch.zeros(1, VOCAB_SIZE)
    draws = set()
    for seed in (1, 2):
        for choice in (0, 1):
            delta = SlotDelta(0, 0, replace(PLAIN, seed=seed), choice, ())
            take_slots(sampler, [delta], VOCAB_SIZE)
            draws |= {int(draw(sampler, flat, [0], [index]).tokens_S) for index in (0, 1)}
    assert len(draws) == 8


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(1, vocab_size=20)
    sampler = Sampler(1, 20)
    place(sampler, 0, replace(GREEDY, repetition_penalty=1.7), prompt_ids=(2, 3), output_ids=(4, 4))
    seen = torch.tensor([[2, 3, 4, 4]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits.clone())
    overwritten = logits.clone()
    sampler.sample(overwritten, np.array([0]), np.array([2]))
    assert torch.equal(overwritten, expected)


def test_presence_and_frequency_look_at_the_output_only_and_count_what_is_drawn() -> None:
    sampler = Sampler(1, 8)
    sampling = replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25)
    place(sampler, 0, sampling, prompt_ids=(1, 1, 1), output_ids=(2, 2))
    logits = torch.zeros(1, 8)
    logits[0, 5] = 1.0
    first = logits.clone()
    assert int(sampler.sample(first, np.array([0]), np.array([2])).tokens_S) == 5
    assert first[0].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    second = logits.clone()
    sampler.sample(second, np.array([0]), np.array([3]))
    assert second[0].tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 0.25, 0.0, 0.0]


def test_logit_bias_adds_up_and_ignores_ids_outside_the_vocabulary() -> None:
    bias = ((3, 60.0), (3, 60.0), (VOCAB_SIZE, 1e9), (-1, 1e9))
    sampled = draw(sampler_of(replace(GREEDY, logit_bias=bias)), random_logits(1), [0], [0])
    assert sampled.tokens_S.tolist() == [3]


def test_stop_ids_cannot_be_drawn_before_min_tokens() -> None:
    sampler = sampler_of()
    stop_ids = (3, VOCAB_SIZE + 7)
    place(sampler, 0, replace(GREEDY, min_tokens=2, logit_bias=((3, 99.0),)), stop_ids=stop_ids)
    tokens = [int(draw(sampler, random_logits(1), [0], [index]).tokens_S) for index in range(4)]
    assert tokens[0] == tokens[1] != 3
    assert tokens[2:] == [3, 3]


def test_the_end_of_a_structured_text_is_up_to_its_masks() -> None:
    sampler = sampler_of()
    structured = replace(
        GREEDY, min_tokens=2, grammar_spec=GrammarSpec("start: /a/"), logit_bias=((3, 99.0),)
    )
    place(sampler, 0, structured, stop_ids=(3,))
    assert draw(sampler, random_logits(1), [0], [0]).tokens_S.tolist() == [3]


def test_a_row_that_is_not_finite_is_flagged_alone() -> None:
    logits = random_logits(5)
    logits[1, 3], logits[2, 4], logits[3, 5] = torch.nan, torch.inf, -torch.inf
    noisy = [PLAIN, replace(PLAIN, top_p=0.5), replace(PLAIN, top_k=3), GREEDY, PLAIN]
    sampled = draw(sampler_of(*noisy), logits, list(range(5)), [0] * 5)
    assert sampled.finite_S.tolist() == [True, False, False, False, True]
    assert bool(((sampled.tokens_S >= 0) & (sampled.tokens_S < VOCAB_SIZE)).all())
    alone = draw(sampler_of(*noisy), logits[4:], [4], [0])
    assert int(alone.tokens_S) == int(sampled.tokens_S[4])


def test_logprobs_are_taken_before_anything_changes_the_logits() -> None:
    logits = random_logits(2)
    wanted = replace(PLAIN, temperature=0.1, top_k=2, logit_bias=((9, 50.0),), num_logprobs=2)
    sampled = draw(sampler_of(PLAIN, wanted), logits, [0, 1], [0, 0])
    ((entry,),) = sampled.logprobs.values()
    raw = logits[1].log_softmax(-1)
    assert entry.chosen == pytest.approx(float(raw[9]))
    assert entry.top_ids == tuple(raw.topk(2).indices.tolist())
    assert entry.top_logprobs == pytest.approx(raw.topk(2).values.tolist())


def test_each_row_gets_as_many_logprobs_as_it_asked_for_and_may_have() -> None:
    asked = [-1, 0, 5, MAX_TOP_LOGPROBS + 100]
    sampler = sampler_of(*[replace(GREEDY, num_logprobs=count) for count in asked])
    table = draw(sampler, random_logits(4), [0, 1, 2, 3], [0] * 4).logprobs
    assert {s: len(entries[0].top_ids) for s, entries in table.items()} == {
        1: 0,
        2: 5,
        3: MAX_TOP_LOGPROBS,
    }


def test_count_rows_are_reused_when_slots_change_hands() -> None:
    sampler = Sampler(64, 8)
    penalised = replace(GREEDY, presence_penalty=1.0)
    for turn in range(200):
        slot = turn % 64
        place(sampler, slot, penalised if turn % 3 else GREEDY, output_ids=(turn % 8,))
    assert sampler._penalties._counts_CV.shape[0] <= 64
