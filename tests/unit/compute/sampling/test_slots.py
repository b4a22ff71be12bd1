"""A slot's settings as words."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.kernels.step import slot_words as words
from services.compute.sampling.slots import known_bias, slot_words
from services.compute.step import SlotDelta

VOCAB_SIZE = 1000
PLAIN = SamplingParams(max_tokens=100, seed=1)


def row(sampling: SamplingParams, choice: int = 0, stop_ids: tuple[int, ...] = ()) -> np.ndarray:
    packed = slot_words(SlotDelta(0, 0, sampling, choice, stop_ids), VOCAB_SIZE)
    assert packed.shape == (words.NUM_WORDS,) and packed.dtype == np.int32
    return packed


def float_at(packed: np.ndarray, place: int) -> float:
    return float(packed.view(np.float32)[place])


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1))
def test_the_seed_keeps_its_low_64_bits(seed: int, choice: int) -> None:
    packed = row(replace(PLAIN, seed=seed), choice)
    low, high = (int(word) for word in packed[words.SEED : words.SEED + 2].view(np.uint32))
    assert low | high << 32 == seed % 2**64
    assert packed[words.CHOICE] == choice


def test_floats_are_kept_by_their_bits_and_top_p_in_full() -> None:
    sampling = replace(PLAIN, temperature=0.7, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    packed = row(replace(sampling, presence_penalty=-1.5, frequency_penalty=0.3))
    assert float_at(packed, words.TEMPERATURE) == np.float32(0.7)
    assert packed[words.TOP_P : words.TOP_P + 2].view(np.float64)[0] == 0.9
    assert float_at(packed, words.MIN_P_LOG) == np.float32(math.log(0.05))
    assert float_at(packed, words.PRESENCE) == -1.5
    assert float_at(packed, words.FREQUENCY) == np.float32(0.3)
    assert float_at(packed, words.REPETITION) == np.float32(1.1)
    assert float_at(row(PLAIN), words.MIN_P_LOG) == -math.inf


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, 0),
        ({"temperature": 0.0}, 0),
        ({"top_k": 5}, words.CUTS_TOP_K),
        ({"top_k": VOCAB_SIZE}, 0),
        ({"top_p": 0.5, "min_p": 0.1}, words.CUTS_TOP_P | words.CUTS_MIN_P),
        ({"temperature": 1e-6, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0),
        ({"presence_penalty": 1.0}, words.PENALISED),
        ({"frequency_penalty": -1.0}, words.PENALISED),
        ({"repetition_penalty": 1.1, "temperature": 0.0}, words.PENALISED),
        ({"logit_bias": ((3, 1.0),)}, words.BIASED),
        ({"logit_bias": ((VOCAB_SIZE, 1.0), (-1, 1.0))}, 0),
        ({"min_tokens": 3}, words.HAS_STOPS),
        (
            {"min_tokens": 3, "grammar_spec": GrammarSpec("start: /a/")},
            words.STRUCTURED,
        ),  # by its masks
        ({"num_logprobs": 0}, words.SCORED),
    ],
)
def test_flags_say_what_a_row_asks_for(changes: dict, flags: int) -> None:
    assert row(replace(PLAIN, **changes), stop_ids=(1, 2))[words.FLAGS] == flags


def test_tiny_temperatures_are_greedy() -> None:
    assert float_at(row(replace(PLAIN, temperature=9e-6)), words.TEMPERATURE) == 0.0
    assert float_at(row(replace(PLAIN, temperature=1e-5)), words.TEMPERATURE) > 0.0


def test_ids_beyond_the_vocabulary_do_not_count() -> None:
    sampling = replace(PLAIN, min_tokens=2**40, logit_bias=((3, 1.0), (3, 2.0), (5000, 1.0)))
    packed = row(sampling, stop_ids=(4, 1000, -1, 999))
    assert packed[words.NUM_BIAS] == 1 and packed[words.NUM_STOPS] == 2
    assert packed[words.MIN_TOKENS] == 2**31 - 1
    assert known_bias(sampling, VOCAB_SIZE) == {3: 3.0}


def test_logprobs_are_as_many_as_there_is_room_for() -> None:
    assert row(replace(PLAIN, num_logprobs=1000))[words.NUM_LOGPROBS] == words.MAX_TOP_LOGPROBS
    assert row(PLAIN)[words.NUM_LOGPROBS] == -1
    delta = SlotDelta(0, 0, replace(PLAIN, num_logprobs=10), 0, ())
    assert slot_words(delta, vocab_size=6)[words.NUM_LOGPROBS] == 6
