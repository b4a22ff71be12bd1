"""top_k, top_p and min_p as a threshold per row, found without a sort in two readings.

A row's logits less their maximum, divided by the temperature, are at most 0: the bits of their
magnitudes are integer keys that grow as ids become less likely. What a row keeps are the keys up
to the largest one present whose ids before it count less than k, or weigh less than p of all. A
sample of the row says where bins are to be narrow. The first reading counts the row's ids by bins,
and finds its maximum, which the keys need. From the counts follows between which keys the
threshold must lie; the second reading takes sums up to there and gathers the few ids there, which
one program bisects. A row with top_k and top_p searches for the former and then for the latter
among what is kept, which is few ids as a rule. Sums are of integers, so a row's outcome is the same
in any batch and in any split; where the counts pointed at the wrong keys, a slow search of the
whole row finds the same.

Shape legend: S samples, V vocabulary, N slots, W words, C parts of the vocabulary, B bins,
M candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.lanes import (
    INTERPRETED,
    NUM_LANES,
    add_counts,
    count_numbers,
    no_counts,
    scatter,
)
from services.compute.kernels.sampling.sample_rows import (
    CUT,
    CUTS_TOP_K,
    CUTS_TOP_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_64,
    load_float,
    settings_of,
)
from services.compute.kernels.sampling.top_k_top_p_search import (
    BEFORE_1,
    BY_MASS,
    COLUMNS,
    GUESS,
    GUESS_WORDS,
    HIGH,
    INFINITE,
    LOW,
    MASSLESS,
    NO_KEY,
    ORIGIN,
    SAMPLED_TOP,
    SECOND_UNIT,
    STATE,
    STATE_WORDS,
    TILE,
    UNIT,
    B,
    bisect,
    bisect_row,
    bracket,
    first_high,
    goes_on,
    guess,
    load_bracket,
    load_keys,
    load_logits,
    mass,
    rough_mass,
    row_of,
    row_top,
    sum_row,
    tile_at,
    units_of,
)
from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step.slot_words import ProcessedLogits, SampleRows
from services.compute.kernels.step.step_buffers import NUM_SAMPLES

MAX_CANDIDATES = 4096
TILE_IDS = 4096
FEW_SAMPLES = 96
TILES_OF_MANY = 4
MAX_REGISTERS = 80  # three programs of 256 threads on a processor


class TopKTopPScratch(NamedTuple):
    """Partial sums and brackets of a search for a threshold."""

    guess_SW: Tensor  # float32
    top_SC: Tensor  # float32, the maximum of each part
    counts_SB: Tensor  # int32, ids of each bin, as `count_numbers` numbers them
    masses_SC2: Tensor  # float32, the mass of each part, and what of it lies below the bins
    state_SL: Tensor  # int32 [S, STATE], the bracket
    sums_SC2: Tensor  # int64, of each part the ids or the mass below the bracket, and the mass
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
        parts = -(-vocab_size // TILE_IDS)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return TopKTopPScratch(
            zeros(max_samples, GUESS_WORDS, dtype=torch.float32),
            zeros(max_samples, parts, dtype=torch.float32),
            zeros(max_samples, NUM_LANES),
            zeros(max_samples, parts, 2, dtype=torch.float32),
            zeros(max_samples, STATE_WORDS),
            zeros(max_samples, parts, 2, dtype=torch.int64),
            zeros(max_samples),
            zeros(max_samples, max_candidates),
        )


@triton.jit
def _guess(logits_ptr, adjusted_ptr, scratch, keep_ptr, rows, V: tl.constexpr):
    sample = tl.program_id(0)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & CUT) != 0):
        tl.store(scratch.found_S + sample, 0)
        tl.store(keep_ptr + sample, INFINITE)
        tl.store(scratch.counts_SB + sample * B + tl.arange(0, B), 0)
        if (flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0:
            row = row_of(sample, logits_ptr, adjusted_ptr, flags, V)
            guess(row, flags, word_ptr, scratch.guess_SW + sample * GUESS, V)


@triton.jit
def _count(
    logits_ptr,
    adjusted_ptr,
    scratch,
    rows,
    V: tl.constexpr,
    C: tl.constexpr,
    TILES: tl.constexpr,
    FAST: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & CUT) != 0):
        row = row_of(sample, logits_ptr, adjusted_ptr, flags, V)
        guess_ptr = scratch.guess_SW + sample * GUESS
        is_counted = (flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0
        by_mass = (flags & CUTS_TOP_P) != 0
        origin = tl.load(guess_ptr + ORIGIN, mask=is_counted, other=0.0)
        per_unit = 1.0 / tl.load(guess_ptr + UNIT, mask=is_counted, other=1.0)
        sampled_top = tl.load(guess_ptr + SAMPLED_TOP, mask=is_counted, other=0.0)
        temperature = load_float(word_ptr + TEMPERATURE)
        top = tl.full([COLUMNS], -float("inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        rest = tl.zeros([COLUMNS], tl.float32)
        counts = no_counts(COLUMNS, FAST)
        for step in range(TILES):
            logits = load_logits(row, tile_at((part * TILES + step) * TILE), V)
            top = tl.maximum(top, tl.max(logits, axis=0))
            if is_counted:
                units = units_of(logits, origin, per_unit)
                counts += count_numbers(units.to(tl.int32, bitcast=True), FAST)
                if by_mass:
                    masses = rough_mass(logits, sampled_top, temperature)
                    total += tl.sum(masses, axis=0)
                    rest += tl.sum(tl.where(units < SECOND_UNIT, masses, 0.0), axis=0)
        place = sample * C + part
        tl.store(scratch.top_SC + place, tl.max(top, axis=0))
        if is_counted:
            add_counts(scratch.counts_SB + sample * B, counts, FAST)
            tl.store(scratch.masses_SC2 + place * 2, tl.sum(total, axis=0))
            tl.store(scratch.masses_SC2 + place * 2 + 1, tl.sum(rest, axis=0))


@triton.jit
def _bracket(
    scratch,
    row_top_ptr,
    rows,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
):
    sample = tl.program_id(0)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & CUT) != 0):
        top = row_top(scratch.top_SC + sample * C, PARTS, LANES)
        tl.store(row_top_ptr + sample, top)
        if (flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0:
            part = tl.arange(0, LANES)
            place, there = sample * C + part, part < PARTS
            number = (tl.arange(0, B) + BEFORE_1) & (B - 1)
            counts = tl.load(scratch.counts_SB + sample * B + number)
            masses_ptr = scratch.masses_SC2 + place * 2
            total = tl.sum(tl.load(masses_ptr, mask=there, other=0.0), axis=0)
            rest = tl.sum(tl.load(masses_ptr + 1, mask=there, other=0.0), axis=0)
            guess_ptr = scratch.guess_SW + sample * GUESS
            low, high, by_mass = bracket(counts, top, total, rest, flags, word_ptr, guess_ptr, M)
            state_ptr = scratch.state_SL + sample * STATE
            tl.store(state_ptr + LOW, low)
            tl.store(state_ptr + HIGH, high)
            tl.store(state_ptr + BY_MASS, by_mass.to(tl.int32))


@triton.jit
def _gather(
    logits_ptr,
    adjusted_ptr,
    scratch,
    row_top_ptr,
    rows,
    V: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    TILES: tl.constexpr,
    FAST: tl.constexpr,
):
    part = tl.program_id(0)
    # the last rows that were read may still be in the cache
    sample = tl.num_programs(1) - 1 - tl.program_id(1)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        row = row_of(sample, logits_ptr, adjusted_ptr, flags, V)
        temperature, top = load_float(word_ptr + TEMPERATURE), tl.load(row_top_ptr + sample)
        low, high, by_mass = load_bracket(scratch.state_SL + sample * STATE)
        span = tl.where(high - low > 1, high - low, 0).to(tl.uint32)
        base = tl.zeros([COLUMNS], tl.int64)
        total = tl.zeros([COLUMNS], tl.int64)
        for step in range(TILES):
            ids = tile_at((part * TILES + step) * TILE)
            keys = load_keys(row, ids, top, temperature, V, FAST)
            if by_mass:
                weights = mass(keys)
                total += tl.sum(weights, axis=0)
                base += tl.sum(tl.where(keys < low, weights, 0), axis=0)
            else:
                base += tl.sum((keys < low).to(tl.int32), axis=0)
            mine = (keys - low).to(tl.uint32, bitcast=True) < span
            ones = mine.to(tl.int32)
            columns = tl.sum(ones, axis=0)
            num_mine = tl.sum(columns, axis=0)
            if num_mine > 0:
                # in any order: what is made of them are sums
                first = tl.atomic_add(scratch.found_S + sample, num_mine, sem="relaxed")
                before = first + tl.cumsum(columns, axis=0) - columns
                place = before[None, :] + tl.cumsum(ones, axis=0) - ones
                scatter(scratch.candidates_SM + sample * M + place, keys, mine & (place < M), FAST)
        sums_ptr = scratch.sums_SC2 + (sample * C + part) * 2
        tl.store(sums_ptr, tl.sum(base, axis=0))
        tl.store(sums_ptr + 1, tl.sum(total, axis=0))


@triton.jit
def _settle(
    logits_ptr,
    adjusted_ptr,
    scratch,
    keep_ptr,
    row_top_ptr,
    rows,
    V: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
):
    sample = tl.program_id(0)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        row = row_of(sample, logits_ptr, adjusted_ptr, flags, V)
        temperature, top = load_float(word_ptr + TEMPERATURE), tl.load(row_top_ptr + sample)
        low, high, by_mass = load_bracket(scratch.state_SL + sample * STATE)
        held = tl.load(scratch.found_S + sample)
        part = tl.arange(0, LANES)
        sums_ptr = scratch.sums_SC2 + (sample * C + part) * 2
        base = tl.sum(tl.load(sums_ptr, mask=part < PARTS, other=0), axis=0)
        total = tl.sum(tl.load(sums_ptr + 1, mask=part < PARTS, other=0), axis=0)
        top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True)
        limit = tl.load(word_ptr + TOP_K).to(tl.float64)
        if by_mass:
            limit = top_p * total.to(tl.float64)
        p_is_left = ((flags & CUTS_TOP_P) != 0) & (not by_mass)
        candidate = tl.arange(0, M)
        there = candidate < held
        keys = tl.load(scratch.candidates_SM + sample * M + candidate, mask=there, other=NO_KEY)
        weights = tl.where(there, tl.where(by_mass, mass(keys), 1), 0)
        # the bracket is a guess: here it shows whether the threshold lies in it
        is_above = (low == 0) | (base.to(tl.float64) < limit)
        upto = (base + tl.sum(weights, axis=0)).to(tl.float64)
        is_below = (held <= M) & ((upto >= limit) | (high == first_high(by_mass)))
        if is_above & is_below:
            from_zero = p_is_left & goes_on(flags, word_ptr, M) & (low == 0)
            low = bisect(keys, weights, low, high, base, limit)
            if from_zero:
                kept = tl.where(keys <= low, mass(keys), 0)
                limit = top_p * tl.sum(kept, axis=0).to(tl.float64)
                high = tl.minimum(low + 1, MASSLESS)
                low = bisect(keys, kept, tl.zeros_like(low), high, tl.zeros_like(base), limit)
                p_is_left = flags < 0
        else:
            high = tl.where(is_above, first_high(by_mass), low)
            low = tl.where(is_above, low, 0)
            base = tl.where(is_above, base, 0)
            low = bisect_row(row, top, temperature, low, high, base, limit, by_mass, V)
        if p_is_left:
            zero = tl.zeros_like(low)
            high = tl.minimum(low + 1, MASSLESS)
            total = sum_row(row, top, temperature, zero, high, p_is_left, V)
            limit = top_p * total.to(tl.float64)
            base = tl.zeros_like(base)
            low = bisect_row(row, top, temperature, zero, high, base, limit, p_is_left, V)
        tl.store(keep_ptr + sample, low)


def top_k_top_p(
    logits_SV: Tensor, rows: SampleRows, scratch: TopKTopPScratch, shaped: ProcessedLogits
) -> None:
    """Write what rows with cuts keep and their maxima; min_p is left to who draws.

    Adjusted rows are taken from `shaped.adjusted_SV`, others from the logits.
    """
    keep_S, top_S = shaped.keep_S, shaped.top_S
    num_samples, vocab_size = logits_SV.shape
    tiles = 1 if num_samples <= FEW_SAMPLES else TILES_OF_MANY
    parts = triton.cdiv(vocab_size, TILE_IDS * tiles)
    tensors = (logits_SV, shaped.adjusted_SV, scratch)
    columns, max_candidates = scratch.top_SC.shape[1], scratch.candidates_SM.shape[1]
    split = {"V": vocab_size, "C": columns, "TILES": tiles, "FAST": not INTERPRETED}
    merge = {
        "C": columns,
        "PARTS": parts,
        "LANES": triton.next_power_of_2(parts),
        "M": max_candidates,
    }
    grid, by_row = (parts, num_samples), (num_samples,)
    _guess[by_row](*tensors, keep_S, rows, V=vocab_size, num_warps=8)
    _count[grid](*tensors, rows, **split, maxnreg=MAX_REGISTERS, num_warps=8)
    _bracket[by_row](scratch, top_S, rows, **merge, num_warps=1)
    _gather[grid](
        *tensors, top_S, rows, **split, M=max_candidates, maxnreg=MAX_REGISTERS, num_warps=8
    )
    _settle[by_row](*tensors, keep_S, top_S, rows, V=vocab_size, **merge, num_warps=8)


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
