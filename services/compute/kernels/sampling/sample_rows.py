"""How the kernels of sampling find a sample's slot, that slot's settings and the sample's mask.

Shape legend: S samples, N slots, W words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step import step_buffers

NUM_WORDS = tl.constexpr(words.NUM_WORDS)
FLAGS = tl.constexpr(words.FLAGS)
TEMPERATURE = tl.constexpr(words.TEMPERATURE)
SEED = tl.constexpr(words.SEED)
CHOICE = tl.constexpr(words.CHOICE)
TOP_K = tl.constexpr(words.TOP_K)
TOP_P = tl.constexpr(words.TOP_P)
MIN_P_LOG = tl.constexpr(words.MIN_P_LOG)
PRESENCE = tl.constexpr(words.PRESENCE)
FREQUENCY = tl.constexpr(words.FREQUENCY)
REPETITION = tl.constexpr(words.REPETITION)
MIN_TOKENS = tl.constexpr(words.MIN_TOKENS)
NUM_LOGPROBS = tl.constexpr(words.NUM_LOGPROBS)
NUM_BIAS = tl.constexpr(words.NUM_BIAS)
NUM_STOPS = tl.constexpr(words.NUM_STOPS)

PENALISED = tl.constexpr(words.PENALISED)
CUTS_TOP_K = tl.constexpr(words.CUTS_TOP_K)
CUTS_TOP_P = tl.constexpr(words.CUTS_TOP_P)
SCORED = tl.constexpr(words.SCORED)
HAS_STOPS = tl.constexpr(words.HAS_STOPS)
STRUCTURED = tl.constexpr(words.STRUCTURED)
ADJUSTED = tl.constexpr(words.ADJUSTED)
CUT = tl.constexpr(words.CUT)

NUM_SAMPLES = tl.constexpr(step_buffers.NUM_SAMPLES)
VOID_MASK = tl.constexpr(words.VOID_MASK)
FIRST_FORCED = tl.constexpr(words.FIRST_FORCED)


@triton.jit
def slot_of(sample, rows):
    """The sample's slot; below 0 for padding."""
    slot = tl.load(rows.slot_S + sample)
    return tl.where(sample < tl.load(rows.counts + NUM_SAMPLES), slot, -1)


@triton.jit
def flags_at(word_ptr, index):
    """What output number `index` of a slot asks for: stops are masked early on only."""
    flags = tl.load(word_ptr + FLAGS)
    early = index < tl.load(word_ptr + MIN_TOKENS)
    return tl.where(early, flags, flags & ~HAS_STOPS)


@triton.jit
def settings_of(sample, rows):
    """The sample's slot, where that slot's words lie (slot 0's for padding), and its flags."""
    slot = slot_of(sample, rows)
    word_ptr = rows.params_NW + tl.maximum(slot, 0).to(tl.int64) * NUM_WORDS
    return slot, word_ptr, flags_at(word_ptr, tl.load(rows.index_S + sample))


@triton.jit
def mask_of(sample, flags, mask_of_ptr):
    """The sample's row of bits, or below 0 what `slot_words` says of none."""
    return tl.load(mask_of_ptr + sample, mask=(flags & STRUCTURED) != 0, other=-1)


@triton.jit
def load_float(word_ptr):
    """A float32 that lies in an int32 word."""
    return tl.load(word_ptr).to(tl.float32, bitcast=True)


@triton.jit
def load_64(word_ptr):
    """A value of 64 bits that lies in two words."""
    low = tl.load(word_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(word_ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def not_finite(logits):
    """1 where a logit is NaN or infinite."""
    bits = logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (bits >= 0x7F800000).to(tl.int32)
