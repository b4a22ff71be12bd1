"""The search for a row's threshold: keys of ids, the bracket it lies in, and its end among few ids.

Shape legend: C parts of the vocabulary, K pivots, M candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.sample_rows import (
    ADJUSTED,
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

NUM_PIVOTS = 8
ROUNDS = 3
STATE_WORDS = 8
"""Words of a search's state, of which low, high, the sum below low, the ids between the two, and
the limit of the sum are used."""

K = tl.constexpr(NUM_PIVOTS)
LAUNCHES = tl.constexpr(ROUNDS + 1)
STATE = tl.constexpr(STATE_WORDS)
TILE = tl.constexpr(2048)
LOW, HIGH, BASE, NUM_BETWEEN, LIMIT = map(tl.constexpr, range(5))
MASS_UNIT = tl.constexpr(2.0**40)  # as in the CPU's cuts
MASSLESS = tl.constexpr(0x41E00000)  # key of 28: exp(-28) is below one unit of mass
INFINITE = tl.constexpr(0x7F800000)
NO_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mass(keys):
    """Probability mass of ids by their keys, in units."""
    magnitudes = tl.minimum(keys, MASSLESS).to(tl.float32, bitcast=True)
    return (tl.exp(-magnitudes) * MASS_UNIT).to(tl.int64)


@triton.jit
def row_top(top_ptr, C: tl.constexpr, LANES: tl.constexpr):
    """The row's maximum, of its parts'."""
    part = tl.arange(0, LANES)
    return tl.max(tl.load(top_ptr + part, mask=part < C, other=-float("inf")), axis=0)


@triton.jit
def load_logits(logits_ptr, adjusted_ptr, ids, adjusted, V: tl.constexpr):
    if adjusted:
        logits = tl.load(adjusted_ptr + ids, mask=ids < V, other=-float("inf"))
    else:
        logits = tl.load(logits_ptr + ids, mask=ids < V, other=-float("inf"))
    return logits


@triton.jit
def row_of(sample, logits_ptr, adjusted_ptr, flags, word_ptr, top, V: tl.constexpr):
    """What keys are made of: logits as they came and processed, which of them, maximum, divisor."""
    start = sample.to(tl.int64) * V
    adjusted = (flags & ADJUSTED) != 0
    temperature = load_float(word_ptr + TEMPERATURE)
    return logits_ptr + start, adjusted_ptr + start, adjusted, top, temperature


@triton.jit
def load_keys(row, ids, V: tl.constexpr):
    """Keys of these ids; beyond the vocabulary above all others."""
    logits_ptr, adjusted_ptr, adjusted, top, temperature = row
    logits = load_logits(logits_ptr, adjusted_ptr, ids, adjusted, V)
    scaled = tl.div_rn(logits - top, tl.zeros_like(logits) + temperature)
    return tl.where(ids < V, scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NO_KEY)


@triton.jit
def first_high(by_mass):
    """Above any threshold, among keys of some mass if mass is what is searched by."""
    return tl.where(by_mass, MASSLESS, INFINITE + 1)


@triton.jit
def first_pivots(high):
    """Where thresholds of real models lie; 14 and more below the maximum is rare."""
    pivot = tl.arange(0, K)
    value = tl.where(pivot == 0, 0.5, 1.0)
    value = tl.where(pivot == 2, 2.0, value)
    value = tl.where(pivot == 3, 3.0, value)
    value = tl.where(pivot == 4, 4.5, value)
    value = tl.where(pivot == 5, 7.0, value)
    value = tl.where(pivot == 6, 14.0, value)
    keys = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(pivot == K - 1, high, keys)


@triton.jit
def even_pivots(low, high):
    """The bracket in equal steps: of keys, which within an octave is of values, and of values
    where it reaches down to 0."""
    pivot = tl.arange(0, K)
    steps = (high - low).to(tl.int64) * (pivot + 1) // K
    keys = low + steps.to(tl.int32)
    share = (pivot + 1).to(tl.float32) * (1.0 / K)
    values = tl.minimum(high, MASSLESS).to(tl.float32, bitcast=True) * share
    keys = tl.where(low == 0, values.to(tl.int32, bitcast=True), keys)
    return tl.where(pivot == K - 1, high, keys)


@triton.jit
def is_wide(low, high, base, between, from_zero, M: tl.constexpr):
    """Whether the ids that have to be gathered are still too many."""
    held = between + tl.where(from_zero, base, 0)
    return (held > M) & (high - low > 1)


@triton.jit
def goes_on(flags, word_ptr, M: tl.constexpr):
    """Whether top_p is to be searched for among the few ids that top_k keeps."""
    return (
        ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0) & (tl.load(word_ptr + TOP_K) <= M)
    )


@triton.jit
def _load_bracket(state_ptr):
    """Low, high, sum below low, ids between, limit."""
    low = tl.load(state_ptr + LOW).to(tl.int32)
    high = tl.load(state_ptr + HIGH).to(tl.int32)
    base = tl.load(state_ptr + BASE)
    between = tl.load(state_ptr + NUM_BETWEEN)
    limit = tl.load(state_ptr + LIMIT).to(tl.float64, bitcast=True)
    return low, high, base, between, limit


@triton.jit
def enter(
    TURN: tl.constexpr,
    num_rows: tl.constexpr,
    sample,
    word_ptr,
    by_mass,
    from_zero,
    scratch,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
):
    """The bracket after the launch before: low, high, sum below low, ids between, limit.

    Every program of a row works this out for itself, and the row's first one keeps it.
    """
    before_ptr = scratch.state_SL + (sample * LAUNCHES + TURN - 1) * STATE
    if TURN == 1:
        low = tl.zeros_like(sample)
        high = first_high(by_mass)
        base = tl.zeros_like(sample).to(tl.int64)
        between = base + (M + 1)
        limit = base.to(tl.float64)
        pivots = first_pivots(high)
    else:
        low, high, base, between, limit = _load_bracket(before_ptr)
        pivots = even_pivots(low, high)
    if is_wide(low, high, base, between, from_zero, M):
        pivot = tl.arange(0, K)
        part = tl.arange(0, LANES)
        first = ((TURN - 1) % 2 * num_rows + sample) * (C * K)
        place = first + part[:, None] * K + pivot[None, :]
        there = (part[:, None] < C) & (pivot[None, :] < K)
        counts = tl.sum(tl.load(scratch.counts_2SCK + place, mask=there, other=0), axis=0)
        sums = counts.to(tl.int64)
        if by_mass:
            sums = tl.sum(tl.load(scratch.masses_2SCK + place, mask=there, other=0), axis=0)
        sums += base
        if TURN == 1:
            limit = tl.load(word_ptr + TOP_K).to(tl.float64)
            if by_mass:
                total = tl.sum(tl.where(pivot == K - 1, sums, 0), axis=0)
                limit = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True)
                limit = limit * total.to(tl.float64)
        under = (sums.to(tl.float64) < limit) & (pivot < K - 1)
        num_under = tl.sum(under.to(tl.int32), axis=0)
        last = pivot == num_under - 1
        after = pivot == num_under
        below = tl.sum(tl.where(last, counts, 0), axis=0)
        between = (tl.sum(tl.where(after, counts, 0), axis=0) - below).to(tl.int64)
        base = tl.where(num_under > 0, tl.sum(tl.where(last, sums, 0), axis=0), base)
        low = tl.where(num_under > 0, tl.sum(tl.where(last, pivots, 0), axis=0), low)
        high = tl.sum(tl.where(after, pivots, 0), axis=0)
    if tl.program_id(0) == 0:
        after_ptr = before_ptr + STATE
        tl.store(after_ptr + LOW, low.to(tl.int64))
        tl.store(after_ptr + HIGH, high.to(tl.int64))
        tl.store(after_ptr + BASE, base)
        tl.store(after_ptr + NUM_BETWEEN, between)
        tl.store(after_ptr + LIMIT, limit.to(tl.int64, bitcast=True))
    return low, high, base, between, limit


@triton.jit
def _bisect(keys, weights, low, high, base, limit):
    """The largest key in the bracket with less than the limit before it."""
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + tl.sum(tl.where(keys < middle, weights, 0), axis=0)
        under = below.to(tl.float64) < limit
        low = tl.where(under, middle, low)
        high = tl.where(under, high, middle)
    return low


@triton.jit
def _sum_row(row, low, middle, by_mass, V: tl.constexpr):
    sums = tl.zeros([TILE], tl.int64)
    for first in range(0, V, TILE):
        ids = first + tl.arange(0, TILE)
        keys = load_keys(row, ids, V)
        weights = tl.where(by_mass, mass(keys), 1)
        sums += tl.where((keys >= low) & (keys < middle), weights, 0)
    return tl.sum(sums, axis=0)


@triton.jit
def _bisect_row(row, low, high, base, limit, by_mass, V: tl.constexpr):
    """The same over a whole row: rare, and slow."""
    start = low
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + _sum_row(row, start, middle, by_mass, V)
        under = below.to(tl.float64) < limit
        low = tl.where(under, middle, low)
        high = tl.where(under, high, middle)
    return low


@triton.jit
def settle(
    logits_ptr,
    adjusted_ptr,
    scratch,
    keep_ptr,
    row_top_ptr,
    rows,
    V: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    TURN: tl.constexpr,
):
    sample = tl.program_id(0)
    slot, word_ptr, flags = settings_of(sample, rows)
    if (slot >= 0) & ((flags & CUT) != 0):
        top = row_top(scratch.top_SC + sample * C, C, LANES)
        tl.store(row_top_ptr + sample, top)
        if (flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0:
            row = row_of(sample, logits_ptr, adjusted_ptr, flags, word_ptr, top, V)
            place = (sample * LAUNCHES + TURN) * STATE
            low, high, base, between, limit = _load_bracket(scratch.state_SL + place)
            top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True)
            by_mass = (flags & CUTS_TOP_K) == 0
            from_zero = goes_on(flags, word_ptr, M)
            held = between + tl.where(from_zero, base, 0)
            p_is_left = ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0)
            if held <= M:
                candidate = tl.arange(0, M)
                there = candidate < held
                keys = tl.load(
                    scratch.candidates_SM + sample * M + candidate, mask=there, other=NO_KEY
                )
                weights = tl.where(by_mass, mass(keys), 1)
                weights = tl.where(there, weights, 0)
                base = tl.where(from_zero, 0, base)
                low = _bisect(keys, weights, low, high, base, limit)
                if from_zero:
                    kept = tl.where(keys <= low, mass(keys), 0)
                    limit = top_p * tl.sum(kept, axis=0).to(tl.float64)
                    high = tl.minimum(low + 1, MASSLESS)
                    low = _bisect(keys, kept, tl.zeros_like(low), high, tl.zeros_like(base), limit)
                    p_is_left = flags < 0
            else:
                low = _bisect_row(row, low, high, base, limit, by_mass, V)
            if p_is_left:
                zero = tl.zeros_like(low)
                high = tl.minimum(low + 1, MASSLESS)
                total = _sum_row(row, zero, high, p_is_left, V)
                limit = top_p * total.to(tl.float64)
                base = tl.zeros_like(base)
                low = _bisect_row(row, zero, high, base, limit, p_is_left, V)
            tl.store(keep_ptr + sample, low)
