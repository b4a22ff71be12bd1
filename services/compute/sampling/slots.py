"""The sampling settings of every slot: as arrays for torch, as int32 words for kernels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from common.messages.sampling import SamplingParams
from services.compute.kernels import slot_words as words
from services.compute.step import BoolArray, Int32Array, SlotDelta

Int64Array = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would only lose the ties."""


class SamplingSlots:
    """Settings by slot, of which torch takes columns; a slot that none has taken is greedy.

    Shape legend: N slots, W words of a slot.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words_NW = words_NW = np.zeros((num_slots, words.NUM_WORDS), dtype=np.int32)
        floats_NW = words_NW.view(np.float32)
        self._flags = words_NW[:, words.FLAGS]
        self.temperature = floats_NW[:, words.TEMPERATURE]
        self.seed = words_NW[:, words.SEED : words.SEED + 2].view(np.int64)[:, 0]
        self.choice = words_NW[:, words.CHOICE]
        self.top_k = words_NW[:, words.TOP_K]
        self.top_p = words_NW[:, words.TOP_P : words.TOP_P + 2].view(np.float64)[:, 0]
        self.min_p_log = floats_NW[:, words.MIN_P_LOG]
        self.presence = floats_NW[:, words.PRESENCE]
        self.frequency = floats_NW[:, words.FREQUENCY]
        self.repetition = floats_NW[:, words.REPETITION]
        self.min_tokens = words_NW[:, words.MIN_TOKENS]
        self.num_logprobs = words_NW[:, words.NUM_LOGPROBS]
        self.num_logprobs.fill(-1)
        self.bias_ids = [np.zeros(0, dtype=np.int64)] * num_slots
        self.bias_values = [np.zeros(0, dtype=np.float32)] * num_slots
        self.stop_ids = [np.zeros(0, dtype=np.int64)] * num_slots

    def place(self, delta: SlotDelta) -> None:
        """A sequence takes its slot; ids beyond the vocabulary are of no effect and left out."""
        slot = delta.slot
        self._words_NW[slot] = slot_words(delta, self._vocab_size)
        bias = known_bias(delta.sampling, self._vocab_size)
        self.bias_ids[slot] = np.array(list(bias), dtype=np.int64)
        self.bias_values[slot] = np.array(list(bias.values()), dtype=np.float32)
        self.stop_ids[slot] = known_ids(delta.stop_ids, self._vocab_size).astype(np.int64)

    def asks(self, slots: Int64Array, flag: int) -> BoolArray:
        """Which of the slots have any of these flags."""
        asking: BoolArray = (self._flags[slots] & flag) != 0
        return asking


def barred_tokens(sampling: SamplingParams) -> int:
    """Tokens before which the sampler bars stop ids; for structured outputs the masks do that."""
    return 0 if sampling.grammar_spec is not None else sampling.min_tokens


def slot_words(delta: SlotDelta, vocab_size: int) -> Int32Array:
    """The row [NUM_WORDS] of a sequence's slot."""
    sampling = delta.sampling
    greedy = sampling.temperature < GREEDY_BELOW
    num_bias = len(known_bias(sampling, vocab_size))
    min_tokens = barred_tokens(sampling)
    num_stops = len(known_ids(delta.stop_ids, vocab_size)) if min_tokens > 0 else 0
    flags = _flags(sampling, vocab_size, 0 if greedy else 1)
    flags |= words.BIASED * (num_bias > 0) | words.HAS_STOPS * (num_stops > 0)
    words_W = np.zeros(words.NUM_WORDS, dtype=np.int32)
    floats_W = words_W.view(np.float32)
    words_W[words.FLAGS] = flags
    floats_W[words.TEMPERATURE] = 0.0 if greedy else sampling.temperature
    words_W[words.SEED : words.SEED + 2].view(np.uint64)[0] = sampling.seed & 0xFFFFFFFFFFFFFFFF
    words_W[words.CHOICE] = delta.choice
    words_W[words.TOP_K] = sampling.top_k if flags & words.CUTS_TOP_K else 0
    words_W[words.TOP_P : words.TOP_P + 2].view(np.float64)[0] = sampling.top_p
    floats_W[words.MIN_P_LOG] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    floats_W[words.PRESENCE] = sampling.presence_penalty
    floats_W[words.FREQUENCY] = sampling.frequency_penalty
    floats_W[words.REPETITION] = sampling.repetition_penalty
    words_W[words.MIN_TOKENS] = min(min_tokens, np.iinfo(np.int32).max)
    words_W[words.NUM_LOGPROBS] = min(sampling.num_logprobs, vocab_size, words.MAX_TOP_LOGPROBS)
    words_W[words.NUM_BIAS] = num_bias
    words_W[words.NUM_STOPS] = num_stops
    return words_W


def is_penalised(sampling: SamplingParams) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def known_bias(sampling: SamplingParams, vocab_size: int) -> dict[int, float]:
    """Bias by id; ids beyond the vocabulary are of no effect and left out."""
    bias: dict[int, float] = {}
    for token, value in sampling.logit_bias:
        if 0 <= token < vocab_size:
            bias[token] = bias.get(token, 0.0) + value
    return bias


def known_ids(ids: tuple[int, ...], vocab_size: int) -> Int32Array:
    return np.array([i for i in ids if 0 <= i < vocab_size], dtype=np.int32)


def _flags(sampling: SamplingParams, vocab_size: int, drawn: int) -> int:
    """Greedy rows take the largest, which no cut takes away."""
    return (
        words.PENALISED * is_penalised(sampling)
        | drawn * words.CUTS_TOP_K * (0 < sampling.top_k < vocab_size)
        | drawn * words.CUTS_TOP_P * (sampling.top_p < 1.0)
        | drawn * words.CUTS_MIN_P * (sampling.min_p > 0.0)
        | words.SCORED * (sampling.num_logprobs >= 0)
        | words.STRUCTURED * (sampling.grammar_spec is not None)
    )
