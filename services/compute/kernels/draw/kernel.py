"""The largest of logits plus noise over a vocabulary that many programs share.

A program keeps the best of its part; a second, small launch picks the best of those. Values and
ids are compared only, so the outcome does not depend on how the vocabulary is split.

Shape legend: S samples, V vocabulary, N slots, W words, C parts of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels import slot_words as words
from services.compute.kernels.draw.parts import SMALL_PART, Parts
from services.compute.kernels.step_input.buffers import NUM_SAMPLES as SAMPLES_PLACE

NUM_SAMPLES = tl.constexpr(SAMPLES_PLACE)
TEMPERATURE = tl.constexpr(words.TEMPERATURE)
SEED = tl.constexpr(words.SEED)
CHOICE = tl.constexpr(words.CHOICE)

UNIT = tl.constexpr(2.0**-32)
LARGEST = tl.constexpr(1.0 - 2.0**-24)
SERIES_BELOW = tl.constexpr(0.0625)

BLOCK = 2048
FEW_SAMPLES = 8
STEPS_OF_MANY = 4


@triton.jit
def gumbel(random):
    """Words of 32 bits to noise, -log(-log(1 - u)), in which small u keeps all its bits.

    Products are written as fused ones, so that no compilation rounds differently from another.
    """
    uniform = tl.minimum((random.to(tl.float32) + 0.5) * UNIT, LARGEST)
    tail = tl.fma(uniform, 1.0 / 7.0, 1.0 / 6.0)
    tail = tl.fma(uniform, tail, 1.0 / 5.0)
    tail = tl.fma(uniform, tail, 1.0 / 4.0)
    tail = tl.fma(uniform, tail, 1.0 / 3.0)
    tail = tl.fma(uniform, tail, 1.0 / 2.0)
    series = tl.fma(uniform * uniform, tail, uniform)
    exponential = tl.where(uniform < SERIES_BELOW, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def noise(first, seed, index, choice, BLOCK: tl.constexpr):
    """Gumbel noise of ids first to first + BLOCK; first is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32, bitcast=True)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + index, zero + choice, zero)
    random = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel(tl.reshape(random, [BLOCK]))


@triton.jit
def _best_of_part(
    logits_ptr,
    best_ptr,
    best_id_ptr,
    broken_ptr,
    slot_ptr,
    index_ptr,
    counts_ptr,
    params_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = tl.load(slot_ptr + sample)
    if (sample < tl.load(counts_ptr + NUM_SAMPLES)) & (slot >= 0):
        row_ptr = logits_ptr + sample.to(tl.int64) * V
        word_ptr = params_ptr + slot.to(tl.int64) * W
        temperature = tl.load(word_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
        lane = tl.arange(0, BLOCK)
        start = part * (BLOCK * STEPS)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        best_id = start + lane
        broken = tl.zeros([BLOCK], tl.int32)
        if temperature > 0.0:
            low = tl.load(word_ptr + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(word_ptr + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
            seed = (high << 32) | low
            choice = tl.load(word_ptr + CHOICE).to(tl.uint32, bitcast=True)
            index = tl.load(index_ptr + sample).to(tl.uint32, bitcast=True)
            for step in range(STEPS):
                first = start + step * BLOCK
                ids = first + lane
                logits = tl.load(row_ptr + ids, mask=ids < V, other=0.0)
                broken |= _not_finite(logits)
                scores = tl.fma(noise(first, seed, index, choice, BLOCK), temperature, logits)
                better = (scores > best) & (ids < V)
                best = tl.where(better, scores, best)
                best_id = tl.where(better, ids, best_id)
        else:
            for step in tl.static_range(STEPS):
                ids = start + step * BLOCK + lane
                logits = tl.load(row_ptr + ids, mask=ids < V, other=0.0)
                broken |= _not_finite(logits)
                better = (logits > best) & (ids < V)
                best = tl.where(better, logits, best)
                best_id = tl.where(better, ids, best_id)
        top = tl.max(best, axis=0)
        place = sample * C + part
        tl.store(best_ptr + place, top)
        tl.store(best_id_ptr + place, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0))
        tl.store(broken_ptr + place, tl.max(broken, axis=0))


@triton.jit
def _not_finite(logits):
    bits = logits.to(tl.int32, bitcast=True) & 0x7F800000
    return (bits == 0x7F800000).to(tl.int32)


@triton.jit
def _pick(
    best_ptr,
    best_id_ptr,
    broken_ptr,
    slot_ptr,
    counts_ptr,
    last_token_ptr,
    result_ptr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    RESULT_WIDTH: tl.constexpr,
):
    sample = tl.program_id(0)
    slot = tl.load(slot_ptr + sample)
    if (sample < tl.load(counts_ptr + NUM_SAMPLES)) & (slot >= 0):
        part = tl.arange(0, LANES)
        there = part < PARTS
        place = sample * C + part
        best = tl.load(best_ptr + place, mask=there, other=-float("inf"))
        best_id = tl.load(best_id_ptr + place, mask=there, other=0x7FFFFFFF)
        broken = tl.max(tl.load(broken_ptr + place, mask=there, other=0), axis=0)
        token = tl.min(tl.where(best == tl.max(best, axis=0), best_id, 0x7FFFFFFF), axis=0)
        tl.store(result_ptr + sample * RESULT_WIDTH, token)
        tl.store(result_ptr + sample * RESULT_WIDTH + 1, 1 - broken)
        tl.store(last_token_ptr + slot, token)


def draw(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    parts: Parts,
    last_token_N: Tensor,
    result_SR: Tensor,
) -> None:
    """The next token of each sample into `last_token_N` and the first word of `result_SR`.

    Its second word is 1 if all logits were finite, 0 if the token means nothing. Rows beyond the
    counted samples, or without a slot, stay as they are.
    """
    num_samples, vocab_size = logits_SV.shape
    few = num_samples <= FEW_SAMPLES
    block, steps = (SMALL_PART, 1) if few else (BLOCK, STEPS_OF_MANY)
    used = triton.cdiv(vocab_size, block * steps)
    columns = parts.best_SC.shape[1]
    _best_of_part[(used, num_samples)](
        logits_SV,
        parts.best_SC,
        parts.best_id_SC,
        parts.broken_SC,
        sample_slot_S,
        sample_index_S,
        counts,
        slot_params_NW,
        V=vocab_size,
        W=slot_params_NW.shape[1],
        C=columns,
        BLOCK=block,
        STEPS=steps,
        num_warps=4,
    )
    _pick[(num_samples,)](
        parts.best_SC,
        parts.best_id_SC,
        parts.broken_SC,
        sample_slot_S,
        counts,
        last_token_N,
        result_SR,
        C=columns,
        PARTS=used,
        LANES=triton.next_power_of_2(used),
        RESULT_WIDTH=result_SR.shape[1],
        num_warps=1 if used <= 128 else 4,
    )
