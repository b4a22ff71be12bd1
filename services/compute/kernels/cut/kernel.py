"""top_k, top_p and min_p as a threshold per row, found without a sort.

A row's logits less their maximum, divided by the temperature, are at most 0: the bits of their
magnitudes are integer keys that grow as ids become less likely. What a cut keeps are the keys up
to the largest one present whose ids before it count less than k, or weigh less than p of all. A
few launches narrow the bracket of that key by the sums below eight pivots, all rows and parts of
the vocabulary at once; once a bracket has few ids, they are gathered and one program bisects them.
A row with top_k and top_p searches for the former and then for the latter among what is kept,
which is few ids as a rule. Sums are of integers, so a row's outcome is the same in any batch and
in any split.

Shape legend: S samples, V vocabulary, N slots, W words, C parts, K pivots, M candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.cut.search import PART, PIVOTS, ROUNDS, STATE, CutScratch
from services.compute.kernels.sample_rows.kernel import (
    ADJUSTED,
    CUT,
    CUTS_TOP_K,
    CUTS_TOP_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    flags_at,
    load_64,
    load_float,
    slot_of,
)

LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)
BASE = tl.constexpr(2)
NUM_BETWEEN = tl.constexpr(3)
LIMIT = tl.constexpr(4)

MASS_UNIT = tl.constexpr(2.0**40)  # as in the CPU's cuts
MASSLESS = tl.constexpr(0x41E00000)  # key of 28: exp(-28) is below one unit of mass
INFINITE = tl.constexpr(0x7F800000)
NO_KEY = tl.constexpr(0x7FFFFFFF)
ONE_ID = tl.constexpr(1 << 52)  # count and mass of up to 2048 ids fit one word
MASS_MASK = tl.constexpr((1 << 52) - 1)

TILE = 2048


@triton.jit
def _mass(keys):
    """Probability mass of ids by their keys, in units."""
    magnitudes = tl.minimum(keys, MASSLESS).to(tl.float32, bitcast=True)
    return (tl.exp(-magnitudes) * MASS_UNIT).to(tl.int64)


@triton.jit
def _row_top(top_ptr, C: tl.constexpr, LANES: tl.constexpr):
    """The row's maximum, of its parts'."""
    part = tl.arange(0, LANES)
    return tl.max(tl.load(top_ptr + part, mask=part < C, other=-float("inf")), axis=0)


@triton.jit
def _load_logits(logits_ptr, adjusted_ptr, ids, adjusted, V: tl.constexpr):
    if adjusted:
        logits = tl.load(adjusted_ptr + ids, mask=ids < V, other=-float("inf"))
    else:
        logits = tl.load(logits_ptr + ids, mask=ids < V, other=-float("inf"))
    return logits


@triton.jit
def _load_keys(logits_ptr, adjusted_ptr, ids, adjusted, top, temperature, V: tl.constexpr):
    """Keys of these ids; beyond the vocabulary above all others."""
    logits = _load_logits(logits_ptr, adjusted_ptr, ids, adjusted, V)
    scaled = tl.div_rn(logits - top, tl.zeros_like(logits) + temperature)
    return tl.where(ids < V, scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NO_KEY)


@triton.jit
def _first_high(by_mass):
    """Above any threshold, among keys of some mass if mass is what is searched by."""
    return tl.where(by_mass, MASSLESS, INFINITE + 1)


@triton.jit
def _first_pivots(high, K: tl.constexpr):
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
def _even_pivots(low, high, K: tl.constexpr):
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
def _is_wide(low, high, base, between, from_zero, M: tl.constexpr):
    """Whether the ids that have to be gathered are still too many."""
    held = between + tl.where(from_zero, base, 0)
    return (held > M) & (high - low > 1)


@triton.jit
def _enter(
    TURN: tl.constexpr,
    num_rows: tl.constexpr,
    sample,
    word_ptr,
    by_mass,
    from_zero,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
):
    """The bracket after the launch before: low, high, sum below low, ids between, limit.

    Every program of a row works this out for itself, and the row's first one keeps it.
    """
    before_ptr = state_ptr + (sample * LAUNCHES + TURN - 1) * STATE
    if TURN == 1:
        low = tl.zeros_like(sample)
        high = _first_high(by_mass)
        base = tl.zeros_like(sample).to(tl.int64)
        between = base + (M + 1)
        limit = base.to(tl.float64)
        pivots = _first_pivots(high, K)
    else:
        low = tl.load(before_ptr + LOW).to(tl.int32)
        high = tl.load(before_ptr + HIGH).to(tl.int32)
        base = tl.load(before_ptr + BASE)
        between = tl.load(before_ptr + NUM_BETWEEN)
        limit = tl.load(before_ptr + LIMIT).to(tl.float64, bitcast=True)
        pivots = _even_pivots(low, high, K)
    if _is_wide(low, high, base, between, from_zero, M):
        pivot = tl.arange(0, K)
        part = tl.arange(0, LANES)
        first = ((TURN - 1) % 2 * num_rows + sample) * (C * K)
        place = first + part[:, None] * K + pivot[None, :]
        there = (part[:, None] < C) & (pivot[None, :] < K)
        counts = tl.sum(tl.load(sums_count_ptr + place, mask=there, other=0), axis=0)
        sums = counts.to(tl.int64)
        if by_mass:
            sums = tl.sum(tl.load(sums_mass_ptr + place, mask=there, other=0), axis=0)
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
def _top_of_part(
    logits_ptr,
    adjusted_ptr,
    top_ptr,
    found_ptr,
    keep_ptr,
    slot_ptr,
    index_ptr,
    counts_ptr,
    params_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    PART: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    flags = flags_at(word_ptr, tl.load(index_ptr + sample))
    if (slot >= 0) & ((flags & CUT) != 0):
        row = sample.to(tl.int64) * V
        ids = part * PART + tl.arange(0, PART)
        adjusted = (flags & ADJUSTED) != 0
        logits = _load_logits(logits_ptr + row, adjusted_ptr + row, ids, adjusted, V)
        tl.store(top_ptr + sample * C + part, tl.max(logits, axis=0))
        if part == 0:
            tl.store(found_ptr + sample, 0)
            tl.store(keep_ptr + sample, INFINITE)


@triton.jit
def _narrow(
    logits_ptr,
    adjusted_ptr,
    top_ptr,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    slot_ptr,
    index_ptr,
    counts_ptr,
    params_ptr,
    num_rows: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
    TURN: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    flags = flags_at(word_ptr, tl.load(index_ptr + sample))
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        by_mass = (flags & CUTS_TOP_K) == 0
        if TURN == 0:
            low = tl.zeros_like(sample)
            high = _first_high(by_mass)
            pivots = _first_pivots(high, K)
            wide = high > 0
        else:
            from_zero = _goes_on(flags, word_ptr, M)
            low, high, base, between, limit = _enter(
                TURN,
                num_rows,
                sample,
                word_ptr,
                by_mass,
                from_zero,
                sums_count_ptr,
                sums_mass_ptr,
                state_ptr,
                C,
                LANES,
                M,
                K,
                STATE,
                LAUNCHES,
            )
            pivots = _even_pivots(low, high, K)
            wide = _is_wide(low, high, base, between, from_zero, M)
        if wide:
            row = sample.to(tl.int64) * V
            place = ((TURN % 2 * num_rows + sample) * C + part) * K
            _sum_below(
                logits_ptr + row,
                adjusted_ptr + row,
                sums_count_ptr + place,
                sums_mass_ptr + place,
                part * PART,
                (flags & ADJUSTED) != 0,
                _row_top(top_ptr + sample * C, C, LANES),
                load_float(word_ptr + TEMPERATURE),
                low,
                pivots,
                by_mass,
                V,
                K,
                PART,
                TILE,
            )


@triton.jit
def _goes_on(flags, word_ptr, M: tl.constexpr):
    """Whether top_p is to be searched for among the few ids that top_k keeps."""
    return (
        ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0) & (tl.load(word_ptr + TOP_K) <= M)
    )


@triton.jit
def _sum_below(
    logits_ptr,
    adjusted_ptr,
    count_ptr,
    mass_ptr,
    first,
    adjusted,
    top,
    temperature,
    low,
    pivots,
    by_mass,
    V: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count, or count and weigh, this part's ids from low up to each pivot."""
    counts = tl.zeros([K], tl.int32)
    masses = tl.zeros([K], tl.int64)
    for step in tl.static_range(PART // TILE):
        # two dimensions from the load on, so that nothing has to change its place in registers
        ids = first + step * TILE + tl.arange(0, TILE)[None, :]
        keys = _load_keys(logits_ptr, adjusted_ptr, ids, adjusted, top, temperature, V)
        inside = keys >= low
        below = keys < pivots[:, None]
        if by_mass:
            packed = tl.where(inside, _mass(keys) + ONE_ID, 0)
            sums = tl.sum(tl.where(below, packed, 0), axis=1)
            counts += ((sums >> 52) & 0xFFF).to(tl.int32)
            masses += sums & MASS_MASK
        else:
            counts += tl.sum((below & inside).to(tl.int32), axis=1)
    pivot = tl.arange(0, K)
    tl.store(count_ptr + pivot, counts)
    if by_mass:
        tl.store(mass_ptr + pivot, masses)


@triton.jit
def _gather(
    logits_ptr,
    adjusted_ptr,
    top_ptr,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    found_ptr,
    candidates_ptr,
    slot_ptr,
    index_ptr,
    counts_ptr,
    params_ptr,
    num_rows: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
    TURN: tl.constexpr,
    PART: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    flags = flags_at(word_ptr, tl.load(index_ptr + sample))
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        from_zero = _goes_on(flags, word_ptr, M)
        low, high, base, between, limit = _enter(
            TURN,
            num_rows,
            sample,
            word_ptr,
            (flags & CUTS_TOP_K) == 0,
            from_zero,
            sums_count_ptr,
            sums_mass_ptr,
            state_ptr,
            C,
            LANES,
            M,
            K,
            STATE,
            LAUNCHES,
        )
        held = between + tl.where(from_zero, base, 0)
        if (held <= M) & ((high - low > 1) | from_zero):
            row = sample.to(tl.int64) * V
            keys = _load_keys(
                logits_ptr + row,
                adjusted_ptr + row,
                part * PART + tl.arange(0, PART),
                (flags & ADJUSTED) != 0,
                _row_top(top_ptr + sample * C, C, LANES),
                load_float(word_ptr + TEMPERATURE),
                V,
            )
            mine = (keys >= tl.where(from_zero, 0, low)) & (keys < high)
            ones = mine.to(tl.int32)
            num_mine = tl.sum(ones, axis=0)
            if num_mine > 0:
                # in any order: what is made of them are sums
                first = tl.atomic_add(found_ptr + sample, num_mine)
                place = first + tl.cumsum(ones, axis=0) - 1
                tl.store(candidates_ptr + sample * M + place, keys, mask=mine & (place < M))


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
        keys = _load_keys(logits_ptr, adjusted_ptr, ids, adjusted, top, temperature, V)
        weights = tl.where(by_mass, _mass(keys), 1)
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
def _settle(
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
        top = _row_top(top_ptr + sample * C, C, LANES)
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
            from_zero = _goes_on(flags, word_ptr, M)
            held = between + tl.where(from_zero, base, 0)
            p_is_left = ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0)
            if held <= M:
                candidate = tl.arange(0, M)
                there = candidate < held
                keys = tl.load(candidates_ptr + sample * M + candidate, mask=there, other=NO_KEY)
                weights = tl.where(by_mass, _mass(keys), 1)
                weights = tl.where(there, weights, 0)
                base = tl.where(from_zero, 0, base)
                low = _bisect(keys, weights, low, high, base, limit)
                if from_zero:
                    kept = tl.where(keys <= low, _mass(keys), 0)
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


def cut(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    scratch: CutScratch,
    adjusted_SV: Tensor,
    keep_S: Tensor,
    top_S: Tensor,
) -> None:
    """What rows with cuts keep: ids whose key is at most `keep_S`; min_p is left to who draws.

    Their maximum goes to `top_S`. Adjusted rows are taken from `adjusted_SV`, others from the
    logits.
    """
    num_samples, vocab_size = logits_SV.shape
    parts = triton.cdiv(vocab_size, PART)
    logits = (logits_SV, adjusted_SV)
    sums = (scratch.counts_2SCK, scratch.masses_2SCK, scratch.state_SL)
    rows = (sample_slot_S, sample_index_S, counts, slot_params_NW)
    split = {"V": vocab_size, "W": slot_params_NW.shape[1], "C": parts}
    bracket = {
        **split,
        "LANES": triton.next_power_of_2(parts),
        "M": scratch.candidates_SM.shape[1],
        "STATE": STATE,
        "LAUNCHES": scratch.state_SL.shape[1],
    }
    pivots = {**bracket, "K": PIVOTS, "PART": PART, "num_rows": scratch.top_SC.shape[0]}
    grid = (parts, num_samples)
    _top_of_part[grid](
        *logits, scratch.top_SC, scratch.found_S, keep_S, *rows, **split, PART=PART, num_warps=8
    )
    for turn in range(ROUNDS):
        _narrow[grid](
            *logits, scratch.top_SC, *sums, *rows, **pivots, TURN=turn, TILE=TILE, num_warps=4
        )
    _gather[grid](
        *logits,
        scratch.top_SC,
        *sums,
        scratch.found_S,
        scratch.candidates_SM,
        *rows,
        **pivots,
        TURN=ROUNDS,
        num_warps=8,
    )
    _settle[(num_samples,)](
        *logits,
        scratch.top_SC,
        scratch.state_SL,
        scratch.candidates_SM,
        keep_S,
        top_S,
        *rows,
        **bracket,
        TURN=ROUNDS,
        TILE=TILE,
        num_warps=8,
    )
