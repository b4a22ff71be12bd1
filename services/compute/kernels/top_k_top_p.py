"""top_k, top_p and min_p as a threshold per row, found without a sort.

A row's logits less their maximum, divided by the temperature, are at most 0: the bits of their
magnitudes are integer keys that grow as ids become less likely. What a row keeps are the keys up
to the largest one present whose ids before it count less than k, or weigh less than p of all. A
few launches narrow the bracket of that key by the sums below eight pivots, all rows and parts of
the vocabulary at once; once a bracket has few ids, they are gathered and one program bisects them.
A row with top_k and top_p searches for the former and then for the latter among what is kept,
which is few ids as a rule. Sums are of integers, so a row's outcome is the same in any batch and
in any split.

Shape legend: S samples, V vocabulary, N slots, W words, C parts of the vocabulary, K pivots,
L launches that narrow, M candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels import slot_words as words
from services.compute.kernels.sample_rows import ADJUSTED, CUT, CUTS_TOP_K, CUTS_TOP_P, settings_of
from services.compute.kernels.slot_words import ProcessedLogits, SampleRows
from services.compute.kernels.step_buffers import NUM_SAMPLES
from services.compute.kernels.top_k_top_p_search import (
    INFINITE,
    NUM_PIVOTS,
    ROUNDS,
    STATE_WORDS,
    TILE,
    K,
    enter,
    even_pivots,
    first_high,
    first_pivots,
    goes_on,
    is_wide,
    load_keys,
    load_logits,
    mass,
    row_of,
    row_top,
    settle,
)

MAX_CANDIDATES = 4096


class TopKTopPScratch(NamedTuple):
    """Partial sums and brackets of a search for a threshold."""

    top_SC: Tensor  # float32, the maximum of each part
    counts_2SCK: Tensor  # int32, ids of each part below each pivot; launches take turns
    masses_2SCK: Tensor  # int64, their mass
    state_SL: Tensor  # int64 [S, L, STATE]
    found_S: Tensor  # int32, candidates gathered so far
    candidates_SM: Tensor  # int32, keys

    @staticmethod
    def make(
        max_samples: int,
        vocab_size: int,
        device: torch.device,
        max_candidates: int = MAX_CANDIDATES,
    ) -> TopKTopPScratch:
        """Room for the largest step; `max_candidates` is a power of two."""
        parts = -(-vocab_size // PART_IDS)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return TopKTopPScratch(
            zeros(max_samples, parts, dtype=torch.float32),
            zeros(2, max_samples, parts, NUM_PIVOTS),
            zeros(2, max_samples, parts, NUM_PIVOTS, dtype=torch.int64),
            zeros(max_samples, ROUNDS + 1, STATE_WORDS, dtype=torch.int64),
            zeros(max_samples),
            zeros(max_samples, max_candidates),
        )


PART_IDS = 4096
PART = tl.constexpr(PART_IDS)
ONE_ID = tl.constexpr(1 << 52)  # count and mass of up to 2048 ids fit one word
MASS_MASK = tl.constexpr((1 << 52) - 1)


@triton.jit
def _top_of_part(
    logits_ptr, adjusted_ptr, scratch, keep_ptr, rows, V: tl.constexpr, C: tl.constexpr
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & CUT) != 0):
        row = sample.to(tl.int64) * V
        ids = part * PART + tl.arange(0, PART)
        adjusted = (flags & ADJUSTED) != 0
        logits = load_logits(logits_ptr + row, adjusted_ptr + row, ids, adjusted, V)
        tl.store(scratch.top_SC + sample * C + part, tl.max(logits, axis=0))
        if part == 0:
            tl.store(scratch.found_S + sample, 0)
            tl.store(keep_ptr + sample, INFINITE)


@triton.jit
def _narrow(
    logits_ptr,
    adjusted_ptr,
    scratch,
    rows,
    num_rows: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    TURN: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        by_mass = (flags & CUTS_TOP_K) == 0
        if TURN == 0:
            low = tl.zeros_like(sample)
            high = first_high(by_mass)
            pivots = first_pivots(high)
            wide = high > 0
        else:
            from_zero = goes_on(flags, word_ptr, M)
            low, high, base, between, limit = enter(
                TURN, num_rows, sample, word_ptr, by_mass, from_zero,
                scratch, C, LANES, M,
            )  # fmt: skip
            pivots = even_pivots(low, high)
            wide = is_wide(low, high, base, between, from_zero, M)
        if wide:
            top = row_top(scratch.top_SC + sample * C, C, LANES)
            row = row_of(sample, logits_ptr, adjusted_ptr, flags, word_ptr, top, V)
            place = ((TURN % 2 * num_rows + sample) * C + part) * K
            counts_ptr, masses_ptr = scratch.counts_2SCK + place, scratch.masses_2SCK + place
            _sum_below(row, counts_ptr, masses_ptr, part * PART, low, pivots, by_mass, V)


@triton.jit
def _sum_below(row, counts_ptr, masses_ptr, first, low, pivots, by_mass, V: tl.constexpr):
    """Count, or count and weigh, this part's ids from low up to each pivot."""
    counts = tl.zeros([K], tl.int32)
    masses = tl.zeros([K], tl.int64)
    for step in tl.static_range(PART // TILE):
        # two dimensions from the load on, so that nothing has to change its place in registers
        ids = first + step * TILE + tl.arange(0, TILE)[None, :]
        keys = load_keys(row, ids, V)
        inside = keys >= low
        below = keys < pivots[:, None]
        if by_mass:
            packed = tl.where(inside, mass(keys) + ONE_ID, 0)
            sums = tl.sum(tl.where(below, packed, 0), axis=1)
            counts += ((sums >> 52) & 0xFFF).to(tl.int32)
            masses += sums & MASS_MASK
        else:
            counts += tl.sum((below & inside).to(tl.int32), axis=1)
    pivot = tl.arange(0, K)
    tl.store(counts_ptr + pivot, counts)
    if by_mass:
        tl.store(masses_ptr + pivot, masses)


@triton.jit
def _gather(
    logits_ptr,
    adjusted_ptr,
    scratch,
    rows,
    num_rows: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    TURN: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        from_zero = goes_on(flags, word_ptr, M)
        low, high, base, between, limit = enter(
            TURN, num_rows, sample, word_ptr, (flags & CUTS_TOP_K) == 0, from_zero,
            scratch, C, LANES, M,
        )  # fmt: skip
        held = between + tl.where(from_zero, base, 0)
        if (held <= M) & ((high - low > 1) | from_zero):
            top = row_top(scratch.top_SC + sample * C, C, LANES)
            row = row_of(sample, logits_ptr, adjusted_ptr, flags, word_ptr, top, V)
            keys = load_keys(row, part * PART + tl.arange(0, PART), V)
            mine = (keys >= tl.where(from_zero, 0, low)) & (keys < high)
            ones = mine.to(tl.int32)
            num_mine = tl.sum(ones, axis=0)
            if num_mine > 0:
                # in any order: what is made of them are sums
                first = tl.atomic_add(scratch.found_S + sample, num_mine)
                place = first + tl.cumsum(ones, axis=0) - 1
                tl.store(scratch.candidates_SM + sample * M + place, keys, mask=mine & (place < M))


def top_k_top_p(
    logits_SV: Tensor, rows: SampleRows, scratch: TopKTopPScratch, shaped: ProcessedLogits
) -> None:
    """Write what rows with cuts keep and their maxima; min_p is left to who draws.

    Adjusted rows are taken from `shaped.adjusted_SV`, others from the logits.
    """
    keep_S, top_S = shaped.keep_S, shaped.top_S
    num_samples, vocab_size = logits_SV.shape
    parts = triton.cdiv(vocab_size, PART_IDS)
    tensors = (logits_SV, shaped.adjusted_SV, scratch)
    split = {"V": vocab_size, "C": parts}
    lanes, max_candidates = triton.next_power_of_2(parts), scratch.candidates_SM.shape[1]
    bracket = {**split, "LANES": lanes, "M": max_candidates}
    pivots = {**bracket, "num_rows": scratch.top_SC.shape[0]}
    grid = (parts, num_samples)
    _top_of_part[grid](*tensors, keep_S, rows, **split, num_warps=8)
    for turn in range(ROUNDS):
        _narrow[grid](*tensors, rows, **pivots, TURN=turn, num_warps=4)
    _gather[grid](*tensors, rows, **pivots, TURN=ROUNDS, num_warps=8)
    settle[(num_samples,)](*tensors, keep_S, top_S, rows, **bracket, TURN=ROUNDS, num_warps=8)


HOST_MASS_UNIT = 2.0**40


def top_k_top_p_reference(logits_SV: Tensor, rows: SampleRows, shaped: ProcessedLogits) -> None:
    """As the kernel's; keys are of float32 whatever the logits are."""
    for sample in range(int(rows.counts[NUM_SAMPLES])):
        slot = int(rows.slot_S[sample])
        row_W = rows.params_NW[max(slot, 0)].cpu().numpy()
        if slot < 0 or not row_W[words.FLAGS] & words.CUT:
            continue
        early = int(rows.index_S[sample]) < row_W[words.MIN_TOKENS]
        adjusted = bool(
            row_W[words.FLAGS] & (words.ADJUSTED if early else words.ADJUSTED & ~words.HAS_STOPS)
        )
        logits = (shaped.adjusted_SV if adjusted else logits_SV)[sample].cpu()
        temperature = row_W.view(np.float32)[words.TEMPERATURE].item()
        shaped.top_S[sample] = logits.max()
        logits = (logits - logits.max()) / temperature  # a GPU would multiply by the inverse
        sorted_V = logits.float().sort(descending=True).values
        keep = -torch.inf
        if row_W[words.FLAGS] & words.CUTS_TOP_K:
            keep = float(sorted_V[int(row_W[words.TOP_K]) - 1])
        if row_W[words.FLAGS] & words.CUTS_TOP_P:
            sorted_V = sorted_V[sorted_V >= keep]
            mass = sorted_V.exp().mul(HOST_MASS_UNIT).to(torch.int64)
            limit = row_W[words.TOP_P : words.TOP_P + 2].view(np.float64).item() * float(mass.sum())
            kept = (mass.cumsum(0) - mass).double() < limit
            kept[0] = True
            keep = float(sorted_V[kept][-1])
        shaped.keep_S[sample] = int(np.float32(-keep).view(np.int32)) & 0x7FFFFFFF
