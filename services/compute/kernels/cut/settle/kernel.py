"""The end of a row's search: the threshold among the few ids that were gathered.

Shape legend: C parts of the vocabulary, M candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.cut.bracket.kernel import (
    BASE,
    HIGH,
    LIMIT,
    LOW,
    MASSLESS,
    NO_KEY,
    NUM_BETWEEN,
    goes_on,
    load_keys,
    mass,
    row_top,
)
from services.compute.kernels.sample_rows.kernel import (
    ADJUSTED,
    CUT,
    CUTS_TOP_K,
    CUTS_TOP_P,
    TEMPERATURE,
    TOP_P,
    flags_at,
    load_64,
    load_float,
    slot_of,
)


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
def _sum_row(
    logits_ptr,
    adjusted_ptr,
    adjusted,
    top,
    temperature,
    low,
    middle,
    by_mass,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    sums = tl.zeros([TILE], tl.int64)
    for first in range(0, V, TILE):
        ids = first + tl.arange(0, TILE)
        keys = load_keys(logits_ptr, adjusted_ptr, ids, adjusted, top, temperature, V)
        weights = tl.where(by_mass, mass(keys), 1)
        sums += tl.where((keys >= low) & (keys < middle), weights, 0)
    return tl.sum(sums, axis=0)


@triton.jit
def _bisect_row(
    logits_ptr,
    adjusted_ptr,
    adjusted,
    top,
    temperature,
    low,
    high,
    base,
    limit,
    by_mass,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    """The same over a whole row: rare, and slow."""
    start = low
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + _sum_row(
            logits_ptr,
            adjusted_ptr,
            adjusted,
            top,
            temperature,
            start,
            middle,
            by_mass,
            V,
            TILE,
        )
        under = below.to(tl.float64) < limit
        low = tl.where(under, middle, low)
        high = tl.where(under, high, middle)
    return low


@triton.jit
def settle(
    logits_ptr,
    adjusted_ptr,
    top_ptr,
    state_ptr,
    candidates_ptr,
    keep_ptr,
    row_top_ptr,
    slot_ptr,
    index_ptr,
    counts_ptr,
    params_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
    TURN: tl.constexpr,
    TILE: tl.constexpr,
):
    sample = tl.program_id(0)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    flags = flags_at(word_ptr, tl.load(index_ptr + sample))
    if (slot >= 0) & ((flags & CUT) != 0):
        top = row_top(top_ptr + sample * C, C, LANES)
        tl.store(row_top_ptr + sample, top)
        if (flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0:
            logits_ptr += sample.to(tl.int64) * V
            adjusted_ptr += sample.to(tl.int64) * V
            adjusted = (flags & ADJUSTED) != 0
            temperature = load_float(word_ptr + TEMPERATURE)
            place = (sample * LAUNCHES + TURN) * STATE
            low = tl.load(state_ptr + place + LOW).to(tl.int32)
            high = tl.load(state_ptr + place + HIGH).to(tl.int32)
            base = tl.load(state_ptr + place + BASE)
            between = tl.load(state_ptr + place + NUM_BETWEEN)
            limit = tl.load(state_ptr + place + LIMIT).to(tl.float64, bitcast=True)
            top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True)
            by_mass = (flags & CUTS_TOP_K) == 0
            from_zero = goes_on(flags, word_ptr, M)
            held = between + tl.where(from_zero, base, 0)
            p_is_left = ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0)
            if held <= M:
                candidate = tl.arange(0, M)
                there = candidate < held
                keys = tl.load(candidates_ptr + sample * M + candidate, mask=there, other=NO_KEY)
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
                low = _bisect_row(
                    logits_ptr,
                    adjusted_ptr,
                    adjusted,
                    top,
                    temperature,
                    low,
                    high,
                    base,
                    limit,
                    by_mass,
                    V,
                    TILE,
                )
            if p_is_left:
                zero = tl.zeros_like(low)
                high = tl.minimum(low + 1, MASSLESS)
                total = _sum_row(
                    logits_ptr,
                    adjusted_ptr,
                    adjusted,
                    top,
                    temperature,
                    zero,
                    high,
                    p_is_left,
                    V,
                    TILE,
                )
                low = _bisect_row(
                    logits_ptr,
                    adjusted_ptr,
                    adjusted,
                    top,
                    temperature,
                    zero,
                    high,
                    tl.zeros_like(base),
                    top_p * total.to(tl.float64),
                    p_is_left,
                    V,
                    TILE,
                )
            tl.store(keep_ptr + sample, low)
