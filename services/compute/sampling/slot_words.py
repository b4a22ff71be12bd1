"""The resident row of a slot: its sampling settings as the int32 words that kernels read."""

from __future__ import annotations

import math

import numpy as np

from common.messages.sampling import SamplingParams
from services.compute.kernels.slot_words import (
    BIASED,
    CHOICE,
    CUTS_MIN_P,
    CUTS_TOP_K,
    CUTS_TOP_P,
    FLAGS,
    FREQUENCY,
    GUIDED,
    HAS_STOPS,
    MAX_TOP_LOGPROBS,
    MIN_P_LOG,
    MIN_TOKENS,
    NUM_BIAS,
    NUM_LOGPROBS,
    NUM_STOPS,
    NUM_WORDS,
    PENALISED,
    PRESENCE,
    REPETITION,
    SCORED,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from services.compute.sampling.slots import GREEDY_BELOW, barred_tokens
from services.compute.step import Int32Array, SlotDelta

MAX_INT32 = (1 << 31) - 1


def slot_words(delta: SlotDelta, vocab_size: int) -> Int32Array:
    """The row [NUM_WORDS] of a sequence's slot."""
    sampling = delta.sampling
    greedy = sampling.temperature < GREEDY_BELOW
    num_bias = len(known_bias(sampling, vocab_size))
    min_tokens = barred_tokens(sampling)
    num_stops = len(known_ids(delta.stop_ids, vocab_size)) if min_tokens > 0 else 0
    flags = _flags(sampling, vocab_size, 0 if greedy else 1)
    flags |= BIASED * (num_bias > 0) | HAS_STOPS * (num_stops > 0)
    words = np.zeros(NUM_WORDS, dtype=np.int32)
    floats = words.view(np.float32)
    words[FLAGS] = flags
    floats[TEMPERATURE] = 0.0 if greedy else sampling.temperature
    words[SEED : SEED + 2].view(np.uint64)[0] = sampling.seed & 0xFFFFFFFFFFFFFFFF
    words[CHOICE] = delta.choice
    words[TOP_K] = sampling.top_k if flags & CUTS_TOP_K else 0
    words[TOP_P : TOP_P + 2].view(np.float64)[0] = sampling.top_p
    floats[MIN_P_LOG] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    floats[PRESENCE] = sampling.presence_penalty
    floats[FREQUENCY] = sampling.frequency_penalty
    floats[REPETITION] = sampling.repetition_penalty
    words[MIN_TOKENS] = min(min_tokens, MAX_INT32)
    words[NUM_LOGPROBS] = min(sampling.num_logprobs, vocab_size, MAX_TOP_LOGPROBS)
    words[NUM_BIAS] = num_bias
    words[NUM_STOPS] = num_stops
    return words


def known_bias(sampling: SamplingParams, vocab_size: int) -> dict[int, float]:
    """Bias by id; ids beyond the vocabulary are of no effect and left out."""
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        if 0 <= token < vocab_size:
            bias[token] = bias.get(token, 0.0) + value
    return bias


def known_ids(ids: tuple[int, ...], vocab_size: int) -> Int32Array:
    """Those of the ids that the vocabulary has."""
    return np.array([i for i in ids if 0 <= i < vocab_size], dtype=np.int32)


def _flags(sampling: SamplingParams, vocab_size: int, drawn: int) -> int:
    """Greedy rows take the largest, which no cut takes away."""
    penalised = bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )
    return (
        PENALISED * penalised
        | drawn * CUTS_TOP_K * (0 < sampling.top_k < vocab_size)
        | drawn * CUTS_TOP_P * (sampling.top_p < 1.0)
        | drawn * CUTS_MIN_P * (sampling.min_p > 0.0)
        | SCORED * (sampling.num_logprobs >= 0)
        | GUIDED * (sampling.guidance is not None)
    )
