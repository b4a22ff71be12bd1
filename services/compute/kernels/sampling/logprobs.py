"""Logprobs of the raw distribution: the drawn id's, its rank, and the likeliest ones', not sorted.

Each part of the vocabulary finds its own largest by taking the maximum as often as asked; one
program a row takes the largest of those.

Shape legend: S samples, V vocabulary, N slots, W words, C parts of the vocabulary, N largest of a
part, R words of a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.sample_rows import NUM_LOGPROBS, NUM_WORDS, slot_of
from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step.slot_words import MAX_TOP_LOGPROBS, SampleRows
from services.compute.kernels.step.step_buffers import NUM_SAMPLES

PART = 4096
"""Fixed, since the sum of a row's exponentials is taken part by part and must not depend on the
batch."""

NUM_SCORED, CHOSEN, RANK, TOP_IDS = 2, 3, 4, 5
TOP_LOGPROBS = TOP_IDS + MAX_TOP_LOGPROBS
RESULT_WORDS = TOP_LOGPROBS + MAX_TOP_LOGPROBS
"""A result: token, finite, how many of the likeliest follow (below 0: no logprobs at all), the
drawn id's logprob and its rank (1 for the likeliest), ids, and their logprobs; floats by their
bits."""


class LogprobScratch(NamedTuple):
    """Of each part: maximum, sum of exponentials below it, how many logits are larger than the
    drawn id's, and the largest with their ids."""

    top_SC: Tensor  # float32
    sum_SC: Tensor  # float32
    above_SC: Tensor  # int32
    largest_SCN: Tensor  # int64: a logit's order above, its id below, lower ids larger

    @staticmethod
    def make(max_samples: int, vocab_size: int, device: torch.device) -> LogprobScratch:
        shape = (max_samples, -(-vocab_size // PART))
        return LogprobScratch(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros((*shape, MAX_TOP_LOGPROBS), dtype=torch.int64, device=device),
        )


_NUM_SCORED = tl.constexpr(NUM_SCORED)
_CHOSEN = tl.constexpr(CHOSEN)
_RANK = tl.constexpr(RANK)
_TOP_IDS = tl.constexpr(TOP_IDS)
_TOP_LOGPROBS = tl.constexpr(TOP_LOGPROBS)
NOTHING = tl.constexpr(-(2**63))
LARGEST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _ordered(logits, ids, there):
    """A word that is larger for a larger logit and, of equals, for a lower id."""
    bits = logits.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return tl.where(there, (order << 32) | (ids ^ LARGEST_ID).to(tl.int64), NOTHING)


@triton.jit
def _score_part(
    logits_ptr,
    scratch,
    rows,
    result_ptr,
    V: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    PART: tl.constexpr,
    RESULT_WIDTH: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, rows)
    word_ptr = rows.params_NW + tl.maximum(slot, 0).to(tl.int64) * NUM_WORDS
    wanted = tl.load(word_ptr + NUM_LOGPROBS)
    if (slot >= 0) & (wanted >= 0):
        ids = part * PART + tl.arange(0, PART)
        there = ids < V
        row_ptr = logits_ptr + sample.to(tl.int64) * V
        logits = tl.load(row_ptr + ids, mask=there, other=-float("inf"))
        top = tl.max(logits, axis=0)
        place = sample * C + part
        tl.store(scratch.top_SC + place, top)
        tl.store(scratch.sum_SC + place, tl.sum(tl.exp(logits - top), axis=0))
        chosen = tl.load(row_ptr + tl.load(result_ptr + sample * RESULT_WIDTH))
        tl.store(scratch.above_SC + place, tl.sum((logits > chosen).to(tl.int32), axis=0))
        ordered = _ordered(logits, ids, there)
        for number in range(0, wanted):
            largest = tl.max(ordered, axis=0)
            tl.store(scratch.largest_SCN + place * N + number, largest)
            ordered = tl.where(ordered == largest, NOTHING, ordered)


@triton.jit
def _score_row(
    logits_ptr,
    scratch,
    rows,
    result_ptr,
    V: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    N_LANES: tl.constexpr,
    RESULT_WIDTH: tl.constexpr,
):
    sample = tl.program_id(0)
    slot = slot_of(sample, rows)
    word_ptr = rows.params_NW + tl.maximum(slot, 0).to(tl.int64) * NUM_WORDS
    wanted = tl.load(word_ptr + NUM_LOGPROBS)
    out_ptr = result_ptr + sample * RESULT_WIDTH
    if slot >= 0:
        tl.store(out_ptr + _NUM_SCORED, wanted)
    if (slot >= 0) & (wanted >= 0):
        part = tl.arange(0, LANES)
        place = sample * C + part
        tops = tl.load(scratch.top_SC + place, mask=part < C, other=-float("inf"))
        sums = tl.load(scratch.sum_SC + place, mask=part < C, other=0.0)
        top = tl.max(tops, axis=0)
        below_top = tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))
        token = tl.load(out_ptr)
        chosen = tl.load(logits_ptr + sample.to(tl.int64) * V + token) - top - below_top
        tl.store(out_ptr + _CHOSEN, chosen.to(tl.int32, bitcast=True))
        above = tl.load(scratch.above_SC + place, mask=part < C, other=0)
        tl.store(out_ptr + _RANK, 1 + tl.sum(above, axis=0))
        number = tl.arange(0, N_LANES)
        ranked = tl.load(
            scratch.largest_SCN + place[:, None] * N + number[None, :],
            mask=(part[:, None] < C) & (number[None, :] < wanted),
            other=NOTHING,
        )
        ranked = tl.reshape(ranked, [LANES * N_LANES])
        for rank in range(0, wanted):
            largest = tl.max(ranked, axis=0)
            ranked = tl.where(ranked == largest, NOTHING, ranked)
            order = (largest >> 32).to(tl.int32)
            bits = order ^ ((order >> 31) & 0x7FFFFFFF)
            logprob = bits.to(tl.float32, bitcast=True) - top - below_top
            tl.store(out_ptr + _TOP_IDS + rank, (largest & 0x7FFFFFFF).to(tl.int32) ^ LARGEST_ID)
            tl.store(out_ptr + _TOP_LOGPROBS + rank, logprob.to(tl.int32, bitcast=True))


def logprobs(
    logits_SV: Tensor, rows: SampleRows, scratch: LogprobScratch, result_SR: Tensor
) -> None:
    """Into the words of the results from NUM_SCORED on; word 0 is the drawn id.

    The logits are the model's own, before penalties and cuts.
    """
    num_samples, vocab_size = logits_SV.shape
    parts = triton.cdiv(vocab_size, PART)
    tensors = (logits_SV, scratch, rows, result_SR)
    sizes = {
        "V": vocab_size,
        "C": parts,
        "N": MAX_TOP_LOGPROBS,
        "RESULT_WIDTH": result_SR.stride(0),
    }
    _score_part[(parts, num_samples)](*tensors, **sizes, PART=PART, num_warps=8)
    _score_row[(num_samples,)](
        *tensors,
        **sizes,
        LANES=triton.next_power_of_2(parts),
        N_LANES=triton.next_power_of_2(MAX_TOP_LOGPROBS),
        num_warps=8,
    )


def logprobs_reference(logits_SV: Tensor, rows: SampleRows, result_SR: Tensor) -> None:
    """As the kernel's, in the precision of the logits; only the result is float32."""
    for sample in range(int(rows.counts[NUM_SAMPLES])):
        slot = int(rows.slot_S[sample])
        if slot < 0:
            continue
        wanted = int(rows.params_NW[slot, words.NUM_LOGPROBS])
        result = result_SR[sample]
        result[NUM_SCORED] = wanted
        if wanted < 0:
            continue
        values_V = logits_SV[sample].log_softmax(dim=-1)
        order = logits_SV[sample].sort(descending=True, stable=True).indices[:wanted]
        floats = result.view(torch.float32)
        token = int(result[0])
        floats[CHOSEN] = values_V[token]
        result[RANK] = 1 + int((logits_SV[sample] > logits_SV[sample, token]).sum())
        result[TOP_IDS : TOP_IDS + wanted] = order.to(torch.int32)
        floats[TOP_LOGPROBS : TOP_LOGPROBS + wanted] = values_V[order].float()
