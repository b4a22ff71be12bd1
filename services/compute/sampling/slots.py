"""The sampling settings of every slot: as int32 words for uploads, as arrays for torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kernels.step import slot_words as words
from services.compute.step import (
    MAX_BIAS,
    MAX_STOP_IDS,
    NO_IDS,
    BoolArray,
    Int32Array,
    Int64Array,
    SlotDelta,
    int32_array,
)

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the division would only lose the ties."""


class SamplingSlots:
    """Settings by slot, of which torch takes columns; a slot that none has taken is greedy.

    Shape legend: N slots, W words of a slot.
    """

    def __init__(self, num_slots: int) -> None:
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

    def enter(self, entry: SlotEntry) -> None:
        """A sequence brings its bias and stop ids; they count while its flags say so."""
        slot = entry.slot
        self.bias_ids[slot] = entry.bias_ids.astype(np.int64)
        self.bias_values[slot] = entry.bias.view(np.float32).copy()
        self.stop_ids[slot] = entry.stop_ids.astype(np.int64)

    def take(self, slot_rows: Int32Array) -> None:
        """Sequences take their slots; rows [N, 1+W] are slots and their words."""
        self._words_NW[slot_rows[:, 0]] = slot_rows[:, 1:]

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
    flags |= words.DRAFTS * delta.drafts
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


def slot_entry(delta: SlotDelta, words_W: Int32Array, vocab_size: int) -> SlotEntry | None:
    """What a sequence brings besides its words; None for most, which bring nothing.

    Raises ValueError for more bias pairs or stop ids than there is room for.
    """
    flags = int(words_W[words.FLAGS])
    if not (delta.drafts or flags & (words.PENALISED | words.BIASED | words.HAS_STOPS)):
        return None
    bias = known_bias(delta.sampling, vocab_size)
    stops = known_ids(delta.stop_ids, vocab_size) if flags & words.HAS_STOPS else NO_IDS
    if len(bias) > MAX_BIAS or len(stops) > MAX_STOP_IDS:
        raise ValueError(
            f"slot {delta.slot}: {len(bias)} logit_bias pairs and {len(stops)} stop ids; "
            f"there is room for {MAX_BIAS} and {MAX_STOP_IDS}"
        )
    counted = bool(flags & words.PENALISED)
    brings_ids = counted or delta.drafts
    return SlotEntry(
        delta.slot,
        counted,
        delta.prompt_ids if brings_ids else NO_IDS,
        delta.output_ids if brings_ids else NO_IDS,
        int32_array(list(bias)),
        np.array(list(bias.values()), dtype=np.float32).view(np.int32),
        stops,
        delta.drafts,
        delta.prediction_ids,
    )


def slots_of(deltas: Sequence[SlotDelta], vocab_size: int) -> tuple[Int32Array, list[SlotEntry]]:
    """Slot rows [N, 1+W] of new sequences, and the entries of those that have one.

    Raises ValueError as `slot_entry`.
    """
    rows = np.empty((len(deltas), 1 + words.NUM_WORDS), dtype=np.int32)
    entries = []
    for row, delta in zip(rows, deltas, strict=True):
        row[0], row[1:] = delta.slot, slot_words(delta, vocab_size)
        if (entry := slot_entry(delta, row[1:], vocab_size)) is not None:
            entries.append(entry)
    return rows, entries


class Variant(IntEnum):
    """Which operations a step's sampling needs; on a GPU each is captured by itself.

    Rows that want less than a variant offers come out of it bit by bit as from the smaller one.
    """

    PLAIN = 0  # greedy or temperature only
    CUTS = 1  # top_k, top_p and min_p as well: what most models' own defaults ask for
    ADJUSTED = 2  # penalties, bias, early stops and masks as well
    FULL = 3  # logprobs as well


class SlotFlags:
    """What the samples of slots ask for."""

    def __init__(self, num_slots: int) -> None:
        self._flags = np.zeros(num_slots, dtype=np.int32)
        self._min_tokens = np.zeros(num_slots, dtype=np.int32)

    def take(self, slot_rows: Int32Array) -> None:
        """Sequences take their slots; rows [N, 1+W] are slots and their words."""
        slots = slot_rows[:, 0]
        self._flags[slots] = slot_rows[:, 1 + words.FLAGS]
        self._min_tokens[slots] = slot_rows[:, 1 + words.MIN_TOKENS]

    def variant(self, slots: Int32Array, indices: Int32Array) -> tuple[Variant, bool]:
        """What samples of these slots need, `indices` being their output numbers; and whether they
        will need it as long as the slots have these owners."""
        flags = self._flags[slots]
        all_flags = int(np.bitwise_or.reduce(flags, initial=0))
        is_lasting = not all_flags & words.HAS_STOPS
        if not is_lasting:
            flags = np.where(indices < self._min_tokens[slots], flags, flags & ~words.HAS_STOPS)
            all_flags = int(np.bitwise_or.reduce(flags, initial=0))
        if all_flags & words.SCORED:
            return Variant.FULL, is_lasting
        if all_flags & words.ADJUSTED:
            return Variant.ADJUSTED, is_lasting
        return Variant.CUTS if all_flags & words.CUT else Variant.PLAIN, is_lasting


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
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    penalised = bool(presence or frequency or sampling.repetition_penalty != 1.0)
    return (
        words.PENALISED * penalised
        | drawn * words.CUTS_TOP_K * (0 < sampling.top_k < vocab_size)
        | drawn * words.CUTS_TOP_P * (sampling.top_p < 1.0)
        | drawn * words.CUTS_MIN_P * (sampling.min_p > 0.0)
        | words.SCORED * (sampling.num_logprobs >= 0)
        | words.STRUCTURED * (sampling.grammar_spec is not None)
    )
