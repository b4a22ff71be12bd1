"""Penalties, logit bias, the mask of early stops and that of a grammar, for rows that have any.

Shape legend: S samples, V vocabulary, N slots, W words, B bias pairs of a slot, E stop ids of one,
M words of a row of mask bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.sample_rows import (
    ADJUSTED,
    FIRST_FORCED,
    FREQUENCY,
    HAS_STOPS,
    NUM_BIAS,
    NUM_STOPS,
    NUM_WORDS,
    PENALISED,
    PRESENCE,
    REPETITION,
    flags_at,
    load_float,
    mask_of,
    slot_of,
)
from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step.slot_words import NO_MASK, MaskRows, ProcessedLogits, SampleRows
from services.compute.kernels.step.step_buffers import NUM_SAMPLES
from services.compute.step import MAX_BIAS, MAX_STOP_IDS

SEEN_IN_PROMPT = 1 << 30
"""Set in the count of an id that the prompt has; the bits below count how often it was sampled."""


class ProcessorTables(NamedTuple):
    """How many of a row count lies in the slot's words; the rest is whatever was there."""

    bias_id_NB: Tensor  # int32
    bias_NB: Tensor  # float32
    stop_id_NE: Tensor  # int32

    @staticmethod
    def make(num_slots: int, device: torch.device) -> ProcessorTables:
        return ProcessorTables(
            torch.zeros((num_slots, MAX_BIAS), dtype=torch.int32, device=device),
            torch.zeros((num_slots, MAX_BIAS), dtype=torch.float32, device=device),
            torch.zeros((num_slots, MAX_STOP_IDS), dtype=torch.int32, device=device),
        )


class DraftedRows(NamedTuple):
    """Which rows have drafts of their slots behind them, which are said as far as they know."""

    number_R: Tensor  # int32, of a sample's row: how many
    drafts_NK: Tensor  # int32


PROMPT_BIT = tl.constexpr(SEEN_IN_PROMPT)
BLOCK = 4096


@triton.jit
def _penalised(logits, said, presence, frequency, repetition):
    """Repetition looks at prompt and output, the other two at the output only."""
    count = said & (PROMPT_BIT - 1)
    weaker = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(said != 0, weaker, logits)
    logits = logits - count.to(tl.float32) * frequency
    return logits - (count > 0).to(tl.float32) * presence


@triton.jit
def _process_logits(
    logits_ptr,
    adjusted_ptr,
    said_ptr,
    tables,
    mask_of_ptr,
    bits_ptr,
    rows,
    number_ptr,
    drafts_ptr,
    V: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, rows).to(tl.int64)
    word_ptr = rows.params_NW + tl.maximum(slot, 0) * NUM_WORDS
    flags = flags_at(word_ptr, tl.load(rows.index_S + sample))
    if (slot >= 0) & ((flags & ADJUSTED) != 0):
        row = sample.to(tl.int64) * V
        first = part * BLOCK
        ids = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row + ids, mask=ids < V, other=0.0)
        if (flags & PENALISED) != 0:
            said = tl.load(said_ptr + slot * V + ids, mask=ids < V, other=0)
            if K > 0:
                for place in range(tl.load(number_ptr + sample)):  # 0 but for draft rows
                    said += (ids == tl.load(drafts_ptr + slot * (K + 1) + place)).to(tl.int32)
            presence = load_float(word_ptr + PRESENCE)
            frequency = load_float(word_ptr + FREQUENCY)
            repetition = load_float(word_ptr + REPETITION)
            logits = _penalised(logits, said, presence, frequency, repetition)
        # what is forbidden here stays so: no finite bias brings it back
        mask_row = mask_of(sample, flags, mask_of_ptr)
        if mask_row >= 0:
            bits_ptr += mask_row.to(tl.int64) * M
            words = tl.load(bits_ptr + (ids >> 5), mask=ids < V, other=0)
            logits = tl.where(((words >> (ids & 31)) & 1) != 0, logits, -float("inf"))
        if mask_row <= FIRST_FORCED:
            logits = tl.where(ids + mask_row == FIRST_FORCED, logits, -float("inf"))
        tl.store(adjusted_ptr + row + ids, logits, mask=ids < V)
        # below, other threads of this program change what these have written
        tl.debug_barrier()
        num_bias = tl.load(word_ptr + NUM_BIAS)
        if num_bias > 0:
            pair = tl.arange(0, B)
            biased = tl.load(tables.bias_id_NB + slot * B + pair, mask=pair < num_bias, other=-1)
            mine = (biased >= first) & (biased < first + BLOCK)
            bias = tl.load(tables.bias_NB + slot * B + pair, mask=mine, other=0.0)
            before = tl.load(adjusted_ptr + row + biased, mask=mine, other=0.0)
            tl.store(adjusted_ptr + row + biased, before + bias, mask=mine)
        tl.debug_barrier()
        if (flags & HAS_STOPS) != 0:
            place = tl.arange(0, E)
            here = place < tl.load(word_ptr + NUM_STOPS)
            stops = tl.load(tables.stop_id_NE + slot * E + place, mask=here, other=-1)
            mine = (stops >= first) & (stops < first + BLOCK)
            tl.store(adjusted_ptr + row + stops, -float("inf"), mask=mine)


def process_logits(
    logits_SV: Tensor,
    rows: SampleRows,
    tables: ProcessorTables,
    masks: MaskRows,
    shaped: ProcessedLogits,
    drafted: DraftedRows | None = None,
) -> None:
    """Rows whose slots ask for it go to `shaped.adjusted_SV`, changed; no others are written."""
    num_samples, vocab_size = logits_SV.shape
    _process_logits[(triton.cdiv(vocab_size, BLOCK), num_samples)](
        logits_SV,
        shaped.adjusted_SV,
        shaped.said_NV,
        tables,
        masks.row_of_S,
        masks.bits_GM,
        rows,
        rows.slot_S if drafted is None else drafted.number_R,
        rows.slot_S if drafted is None else drafted.drafts_NK,
        V=vocab_size,
        B=tables.bias_NB.shape[1],
        E=tables.stop_id_NE.shape[1],
        M=masks.bits_GM.shape[1],
        K=0 if drafted is None else drafted.drafts_NK.shape[1] - 1,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,  # products round by themselves, as they do elsewhere
    )


def process_logits_reference(
    logits_SV: Tensor,
    rows: SampleRows,
    tables: ProcessorTables,
    masks: MaskRows,
    shaped: ProcessedLogits,
    drafted: DraftedRows | None = None,
) -> None:
    """As the kernel's, in the precision of the logits."""
    for sample in range(int(rows.counts[NUM_SAMPLES])):
        slot = int(rows.slot_S[sample])
        row_W = rows.params_NW[max(slot, 0)].cpu().numpy()
        floats = row_W.view(np.float32)
        early = int(rows.index_S[sample]) < row_W[words.MIN_TOKENS]
        if slot < 0 or not row_W[words.FLAGS] & (
            words.ADJUSTED if early else words.ADJUSTED & ~words.HAS_STOPS
        ):
            continue
        logits = logits_SV[sample].clone()
        if row_W[words.FLAGS] & words.PENALISED:
            said_V = shaped.said_NV[slot].clone()
            if drafted is not None:
                before = drafted.drafts_NK[slot, : int(drafted.number_R[sample])]
                for draft in before[before >= 0].tolist():
                    said_V[draft] += 1
            times = said_V % SEEN_IN_PROMPT
            repetition = float(floats[words.REPETITION])
            weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(said_V != 0, weaker, logits)
            logits -= times * float(floats[words.FREQUENCY])
            logits -= (times > 0) * float(floats[words.PRESENCE])
        biased = tables.bias_id_NB[slot, : row_W[words.NUM_BIAS]].long()
        logits[biased] += tables.bias_NB[slot, : row_W[words.NUM_BIAS]].to(logits.dtype)
        if early:
            logits[tables.stop_id_NE[slot, : row_W[words.NUM_STOPS]].long()] = -torch.inf
        mask_row = int(masks.row_of_S[sample]) if row_W[words.FLAGS] & words.STRUCTURED else NO_MASK
        if mask_row >= 0:
            bits = masks.bits_GM[mask_row].cpu().numpy().view(np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(logits)]
            logits[torch.from_numpy(allowed == 0).to(logits.device)] = -torch.inf
        if mask_row <= words.FIRST_FORCED:
            forced = torch.full_like(logits, -torch.inf)
            forced[words.FIRST_FORCED - mask_row] = logits[words.FIRST_FORCED - mask_row]
            logits = forced
        shaped.adjusted_SV[sample] = logits
