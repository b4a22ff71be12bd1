"""The next token of each sample: the largest of its logits plus noise.

Many programs share a vocabulary. Each keeps the best of its part; a second, small launch picks the
best of those. Values and ids are compared only, so the outcome does not depend on the split. Ranks
of a split model may have a part of the vocabulary each; between both launches they exchange bests.

Shape legend: S samples, V vocabulary, N slots, W words, C parts of the vocabulary, R words of a
result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.gumbel_noise import gumbel_noise_reference, noise
from services.compute.kernels.sampling.sample_rows import (
    ADJUSTED,
    CHOICE,
    CUT,
    FLAGS,
    MIN_P_LOG,
    NUM_WORDS,
    PENALISED,
    SEED,
    TEMPERATURE,
    VOID_MASK,
    flags_at,
    load_64,
    load_float,
    mask_of,
    not_finite,
    slot_of,
)
from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step.slot_words import MaskRows, ProcessedLogits, SampleRows
from services.compute.kernels.step.step_buffers import NUM_SAMPLES, Resident

SMALL_PART = 1024
"""Ids of the smallest part: at one row, 126 of them keep all of an H200's processors busy."""


MIN_COLUMNS = 64
"""Of scratch: there are no more ranks, each of which has the best of its part."""


class SampleScratch(NamedTuple):
    """The best of each part, and whether the part had a logit that is not finite."""

    best_SC: Tensor  # float32
    best_id_SC: Tensor  # int32
    broken_SC: Tensor  # int32

    @staticmethod
    def make(max_samples: int, vocab_size: int, device: torch.device) -> SampleScratch:
        shape = (max_samples, max(MIN_COLUMNS, -(-vocab_size // SMALL_PART)))
        return SampleScratch(
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
        )


class VocabularyPart(NamedTuple):
    """What a rank has of the vocabulary, where others have the rest."""

    begin: int  # a multiple of 4
    share: Callable[[SampleScratch, int, int], int]
    """Put the bests of all ranks, in their order, in place of those of so many samples and parts
    here; returns how many they are."""


NO_ID = tl.constexpr(0x7FFFFFFF)

BLOCK = 2048
FEW_SAMPLES = 8
STEPS_OF_MANY = 4
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _load_tile(logits_ptr, adjusted_ptr, ids, adjusted, V: tl.constexpr, SHAPED: tl.constexpr):
    """Logits to draw from, and which of the raw ones are not finite."""
    logits = tl.load(logits_ptr + ids, mask=ids < V, other=0.0)
    broken = not_finite(logits)
    if SHAPED:
        if adjusted:
            logits = tl.load(adjusted_ptr + ids, mask=ids < V, other=0.0)
    return logits, broken


@triton.jit
def _best_of_part(
    logits_ptr,
    adjusted_ptr,
    keep_ptr,
    top_ptr,
    scratch,
    rows,
    V: tl.constexpr,
    C: tl.constexpr,
    BEGIN: tl.constexpr,
    SHAPED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    FAST: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, rows)
    if slot >= 0:
        logits_ptr += sample.to(tl.int64) * V
        adjusted_ptr += sample.to(tl.int64) * V
        word_ptr = rows.params_NW + slot.to(tl.int64) * NUM_WORDS
        temperature = load_float(word_ptr + TEMPERATURE)
        adjusted = False
        if SHAPED:
            flags = flags_at(word_ptr, tl.load(rows.index_S + sample))
            adjusted = (flags & ADJUSTED) != 0
            cut = (flags & CUT) != 0
            # cut rows go with their maximum to 0, where float32 is finest, and are drawn from
            # what lies at most so far below it
            top = tl.load(top_ptr + sample)
            lowest = -tl.load(keep_ptr + sample).to(tl.float32, bitcast=True)
            lowest = tl.maximum(lowest, load_float(word_ptr + MIN_P_LOG))
        start = part * (BLOCK * STEPS)
        lane = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        best_id = start + lane
        broken = tl.zeros([BLOCK], tl.int32)
        if temperature > 0.0:
            seed = load_64(word_ptr + SEED)
            choice = tl.load(word_ptr + CHOICE).to(tl.uint32)
            index = tl.load(rows.index_S + sample).to(tl.uint32)
            for step in range(STEPS):
                first = start + step * BLOCK
                ids = first + lane
                logits, bad = _load_tile(logits_ptr, adjusted_ptr, ids, adjusted, V, SHAPED)
                broken |= bad
                there = ids < V
                scale = temperature
                hopeful = True
                if SHAPED:
                    if cut:
                        logits = tl.div_rn(logits - top, tl.zeros_like(logits) + temperature)
                        there &= logits >= lowest
                        scale = 1.0
                    # after a cut few parts have an id left, and noise is most of the work
                    hopeful = tl.max(there.to(tl.int32), axis=0) > 0
                if hopeful:
                    random = noise(BEGIN + first, index, choice, seed, BLOCK, FAST)
                    scores = tl.fma(random, scale, logits)
                    better = (scores > best) & there
                    best = tl.where(better, scores, best)
                    best_id = tl.where(better, ids, best_id)
        else:
            for step in tl.static_range(STEPS):
                ids = start + step * BLOCK + lane
                logits, bad = _load_tile(logits_ptr, adjusted_ptr, ids, adjusted, V, SHAPED)
                broken |= bad
                better = (logits > best) & (ids < V)
                best = tl.where(better, logits, best)
                best_id = tl.where(better, ids, best_id)
        top = tl.max(best, axis=0)
        place = sample * C + part
        tl.store(scratch.best_SC + place, top)
        first_id = tl.min(tl.where(best == top, best_id, NO_ID), axis=0)
        tl.store(scratch.best_id_SC + place, BEGIN + first_id)
        tl.store(scratch.broken_SC + place, tl.max(broken, axis=0))


@triton.jit
def _advance(slot, token, resident):
    """A sequence has one token more."""
    tl.store(resident.last_token + slot, token)
    tl.store(resident.length + slot, tl.load(resident.length + slot) + 1)
    tl.store(resident.output_index + slot, tl.load(resident.output_index + slot) + 1)


@triton.jit
def _pick(
    scratch,
    rows,
    said_ptr,
    mask_of_ptr,
    resident,
    result_ptr,
    V: tl.constexpr,
    C: tl.constexpr,
    SHAPED: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    RESULT_WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    sample = tl.program_id(0)
    slot = slot_of(sample, rows)
    if slot >= 0:
        part = tl.arange(0, LANES)
        there = part < PARTS
        place = sample * C + part
        best = tl.load(scratch.best_SC + place, mask=there, other=-float("inf"))
        best_id = tl.load(scratch.best_id_SC + place, mask=there, other=NO_ID)
        broken = tl.max(tl.load(scratch.broken_SC + place, mask=there, other=0), axis=0)
        token = tl.min(tl.where(best == tl.max(best, axis=0), best_id, NO_ID), axis=0)
        tl.store(result_ptr + sample * RESULT_WIDTH, token)
        tl.store(result_ptr + sample * RESULT_WIDTH + 1, 1 - broken)
        draws = True
        if SHAPED:
            flags = tl.load(rows.params_NW + slot.to(tl.int64) * NUM_WORDS + FLAGS)
            draws = mask_of(sample, flags, mask_of_ptr) != VOID_MASK
            if not DRAFTS:
                if draws & ((flags & PENALISED) != 0):
                    count_ptr = said_ptr + slot.to(tl.int64) * V + token
                    tl.store(count_ptr, tl.load(count_ptr) + 1)
        if DRAFTS:
            tl.store(result_ptr + sample * RESULT_WIDTH + RESULT_WIDTH - 2, tl.where(draws, 1, 0))
        else:
            if draws:
                _advance(slot, token, resident)


def sample_tokens(
    logits_SV: Tensor,
    rows: SampleRows,
    shaped: ProcessedLogits | None,
    masks: MaskRows | None,
    scratch: SampleScratch,
    resident: Resident,
    result_SR: Tensor,
    drafts: bool = False,
    part: VocabularyPart | None = None,
) -> None:
    """The next token of each sample into its slot, which advances by it, and into `result_SR`.

    With `drafts` slots and counts stay as they are, for `draft_tokens` to advance, and the second
    last word there says whether the sample draws.

    It is the first word there; the second is 1 if all logits were finite, 0 if the token means
    nothing. Rows beyond the counted samples, or without a slot, stay as they are. Without `shaped`
    and `masks` no row may be adjusted or cut; with them, tokens of penalised rows are counted. The
    token of a skipped sample is what comes of its logits without a mask, and goes nowhere else.
    With a `part` the logits are of that, and tokens are those of the whole; no row is shaped then.
    """
    num_samples, vocab_size = logits_SV.shape
    few = num_samples <= FEW_SAMPLES
    block, steps = (SMALL_PART, 1) if few else (BLOCK, STEPS_OF_MANY)
    used = triton.cdiv(vocab_size, block * steps)
    columns = scratch.best_SC.shape[1]
    _best_of_part[(used, num_samples)](
        logits_SV,
        logits_SV if shaped is None else shaped.adjusted_SV,
        rows.slot_S if shaped is None else shaped.keep_S,
        logits_SV if shaped is None else shaped.top_S,
        scratch,
        rows,
        V=vocab_size,
        C=columns,
        BEGIN=0 if part is None else part.begin,
        SHAPED=shaped is not None,
        BLOCK=block,
        STEPS=steps,
        FAST=not INTERPRETED,
        num_warps=4 if few else 8,  # 64 registers, so that 32 warps hide each other's loads
    )
    if part is not None:
        assert shaped is None and part.begin % 4 == 0
        used = part.share(scratch, num_samples, used)
    _pick[(num_samples,)](
        scratch,
        rows,
        resident.last_token if shaped is None else shaped.said_NV,
        rows.slot_S if masks is None else masks.row_of_S,
        resident,
        result_SR,
        V=vocab_size,
        C=columns,
        SHAPED=shaped is not None,
        PARTS=used,
        LANES=triton.next_power_of_2(used),
        RESULT_WIDTH=result_SR.stride(0),
        DRAFTS=drafts,
        num_warps=1 if used <= 128 else 4,
    )


def sample_tokens_reference(
    logits_SV: Tensor, rows: SampleRows, resident: Resident, result_SR: Tensor
) -> None:
    """As the kernel's, in the precision of the logits."""
    for sample in range(int(rows.counts[NUM_SAMPLES])):
        slot = int(rows.slot_S[sample])
        if slot < 0:
            continue
        row_W = rows.params_NW[slot].cpu().numpy()
        logits = logits_SV[sample].cpu()
        temperature = float(row_W[words.TEMPERATURE : words.TEMPERATURE + 1].view(np.float32)[0])
        scores = logits
        if temperature > 0.0:
            where = (int(rows.index_S[sample]), int(row_W[words.CHOICE]))
            seed = int(row_W[words.SEED : words.SEED + 2].view(np.uint64)[0])
            scores = logits + temperature * gumbel_noise_reference(seed, where, logits)
        token = int(torch.nan_to_num(scores, -torch.inf).argmax())
        result_SR[sample, 0] = token
        result_SR[sample, 1] = int(logits.isfinite().all())
        resident.last_token[slot] = token
        resident.length[slot] += 1
        resident.output_index[slot] += 1
