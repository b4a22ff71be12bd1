"""top_k, top_p and min_p as a threshold per row, found without a sort.

A row's logits are brought to a maximum of 0 and divided by the temperature; the bits of their
magnitudes are then integer keys that grow as ids become less likely. What a cut keeps are the keys
up to the largest one present whose ids before it count less than k, or weigh less than p of all.
A few launches narrow the bracket of that key by the sums below eight pivots, all rows and parts of
the vocabulary at once; once a bracket has few ids, they are gathered and one program bisects them.
Sums are of integers, so a row's outcome is the same in any batch and in any split.

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
    FLAGS,
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
def _first_pivots(high, K: tl.constexpr):
    """Where thresholds of real models lie; 14 and more below the maximum is rare."""
    pivot = tl.arange(0, K)
    value = tl.where(pivot == 0, 0.5, 1.0)
    value = tl.where(pivot == 2, 2.0, value)
    value = tl.where(pivot == 3, 3.0, value)
    value = tl.where(pivot == 4, 4.5, value)
    value = tl.where(pivot == 5, 7.0, value)
    value = tl.where(pivot == 6, 14.0, value)
    keys = tl.minimum(value.to(tl.float32).to(tl.int32, bitcast=True), high)
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
def _first_high(keep, MASS: tl.constexpr):
    """Above any threshold: kept keys end here, and for mass those that have any."""
    if MASS:
        return tl.minimum(keep + 1, MASSLESS)
    else:
        return tl.zeros_like(keep) + (INFINITE + 1)


@triton.jit
def _enter(
    turn: tl.constexpr,
    sample,
    num_rows: tl.constexpr,
    word_ptr,
    keep,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
    MASS: tl.constexpr,
):
    """The bracket after the launch before: low, high, sum below low, ids between, limit."""
    before_ptr = state_ptr + (sample * LAUNCHES + turn - 1) * STATE
    if turn == 1:
        low = tl.zeros_like(keep)
        high = _first_high(keep, MASS)
        base = tl.zeros_like(keep).to(tl.int64)
        between = base + (M + 1)
        limit = tl.zeros_like(keep).to(tl.float64)
        pivots = _first_pivots(high, K)
    else:
        low = tl.load(before_ptr + LOW).to(tl.int32)
        high = tl.load(before_ptr + HIGH).to(tl.int32)
        base = tl.load(before_ptr + BASE)
        between = tl.load(before_ptr + NUM_BETWEEN)
        limit = tl.load(before_ptr + LIMIT).to(tl.float64, bitcast=True)
        pivots = _even_pivots(low, high, K)
    if (between > M) & (high - low > 1):
        pivot = tl.arange(0, K)
        part = tl.arange(0, LANES)
        first = ((turn - 1) % 2 * num_rows + sample) * (C * K)
        place = first + part[:, None] * K + pivot[None, :]
        there = (part[:, None] < C) & (pivot[None, :] < K)
        counts = tl.sum(tl.load(sums_count_ptr + place, mask=there, other=0), axis=0)
        if MASS:
            sums = tl.sum(tl.load(sums_mass_ptr + place, mask=there, other=0), axis=0) + base
            if turn == 1:
                total = tl.sum(tl.where(pivot == K - 1, sums, 0), axis=0)
                top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True)
                limit = top_p * total.to(tl.float64)
        else:
            sums = counts.to(tl.int64) + base
            limit = tl.load(word_ptr + TOP_K).to(tl.float64)
        under = (sums.to(tl.float64) < limit) & (pivot < K - 1)
        num_under = tl.sum(under.to(tl.int32), axis=0)
        last = pivot == num_under - 1
        after = pivot == num_under
        below = tl.sum(tl.where(last, counts, 0), axis=0)
        between = (tl.sum(tl.where(after, counts, 0), axis=0) - below).to(tl.int64)
        base = tl.where(num_under > 0, tl.sum(tl.where(last, sums, 0), axis=0), base)
        low = tl.where(num_under > 0, tl.sum(tl.where(last, pivots, 0), axis=0), low)
        high = tl.sum(tl.where(after, pivots, 0), axis=0)
    return low, high, base, between, limit


@triton.jit
def _leave(state_ptr, place, low, high, base, between, limit, STATE: tl.constexpr):
    tl.store(state_ptr + place * STATE + LOW, low.to(tl.int64))
    tl.store(state_ptr + place * STATE + HIGH, high.to(tl.int64))
    tl.store(state_ptr + place * STATE + BASE, base)
    tl.store(state_ptr + place * STATE + NUM_BETWEEN, between)
    tl.store(state_ptr + place * STATE + LIMIT, limit.to(tl.int64, bitcast=True))


@triton.jit
def _top_of_part(
    logits_ptr,
    shaped_ptr,
    top_ptr,
    index_ptr,
    slot_ptr,
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
        ids = part * PART + tl.arange(0, PART)
        place = sample.to(tl.int64) * V + ids
        if (flags & ADJUSTED) != 0:
            logits = tl.load(shaped_ptr + place, mask=ids < V, other=-float("inf"))
        else:
            logits = tl.load(logits_ptr + place, mask=ids < V, other=-float("inf"))
        tl.store(top_ptr + sample * C + part, tl.max(logits, axis=0))


@triton.jit
def _narrow(
    logits_ptr,
    shaped_ptr,
    keep_ptr,
    top_ptr,
    index_ptr,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    found_ptr,
    slot_ptr,
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
    MASS: tl.constexpr,
    TURN: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    flags = flags_at(word_ptr, tl.load(index_ptr + sample))
    row = sample.to(tl.int64) * V
    if TURN == 0 and not MASS:
        if (slot >= 0) & ((flags & CUT) != 0):
            _scale(
                logits_ptr + row,
                shaped_ptr + row,
                top_ptr + sample * C,
                load_float(word_ptr + TEMPERATURE),
                (flags & ADJUSTED) != 0,
                part * PART,
                V,
                C,
                LANES,
                PART,
            )
            if part == 0:
                tl.store(keep_ptr + sample, INFINITE)
                tl.store(found_ptr + sample, 0)
            # each program goes on with its own part, by other threads
            tl.debug_barrier()
    wanted = (flags & (CUTS_TOP_P if MASS else CUTS_TOP_K)) != 0
    if (slot >= 0) & wanted:
        if MASS:
            keep = tl.load(keep_ptr + sample)
        else:
            keep = tl.full((), INFINITE, tl.int32)
        if TURN == 0:
            low = tl.zeros_like(keep)
            high = _first_high(keep, MASS)
            pivots = _first_pivots(high, K)
            narrow = high > 0
        else:
            low, high, base, between, limit = _enter(
                TURN,
                sample,
                num_rows,
                word_ptr,
                keep,
                sums_count_ptr,
                sums_mass_ptr,
                state_ptr,
                C,
                LANES,
                M,
                K,
                STATE,
                LAUNCHES,
                MASS,
            )
            if part == 0:
                place = sample * LAUNCHES + TURN
                _leave(state_ptr, place, low, high, base, between, limit, STATE)
            pivots = _even_pivots(low, high, K)
            narrow = (between > M) & (high - low > 1)
        if narrow:
            place = ((TURN % 2 * num_rows + sample) * C + part) * K
            _sum_below(
                shaped_ptr + row,
                sums_count_ptr + place,
                sums_mass_ptr + place,
                part * PART,
                low,
                keep,
                pivots,
                V,
                K,
                MASS,
                PART,
                TILE,
            )


@triton.jit
def _sum_below(
    row_ptr,
    count_ptr,
    mass_ptr,
    first,
    low,
    keep,
    pivots,
    V: tl.constexpr,
    K: tl.constexpr,
    MASS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count, and weigh, this part's ids from low up to each pivot."""
    counts = tl.zeros([K], tl.int32)
    masses = tl.zeros([K], tl.int64)
    for step in tl.static_range(PART // TILE):
        # two dimensions from the load on, so that nothing has to change its place in registers
        keys = _load_keys(row_ptr, first + step * TILE + tl.arange(0, TILE)[None, :], V)
        inside = (keys >= low) & (keys <= keep)
        below = keys < pivots[:, None]
        if MASS:
            packed = tl.where(inside, _mass(keys) + ONE_ID, 0)
            sums = tl.sum(tl.where(below, packed, 0), axis=1)
            counts += ((sums >> 52) & 0xFFF).to(tl.int32)
            masses += sums & MASS_MASK
        else:
            ones = inside.to(tl.int32)
            counts += tl.sum(tl.where(below, ones, 0), axis=1)
    pivot = tl.arange(0, K)
    tl.store(count_ptr + pivot, counts)
    if MASS:
        tl.store(mass_ptr + pivot, masses)


@triton.jit
def _load_keys(row_ptr, ids, V: tl.constexpr):
    logits = tl.load(row_ptr + ids, mask=ids < V, other=0.0)
    keys = logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(ids < V, keys, NO_KEY)


@triton.jit
def _scale(
    logits_ptr,
    shaped_ptr,
    top_ptr,
    temperature,
    adjusted,
    first,
    V: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
):
    """Bring a part of the row to a maximum of 0, where float32 is finest, and the temperature."""
    parts = tl.arange(0, LANES)
    top = tl.max(tl.load(top_ptr + parts, mask=parts < C, other=-float("inf")), axis=0)
    ids = first + tl.arange(0, PART)
    if adjusted:
        logits = tl.load(shaped_ptr + ids, mask=ids < V, other=0.0)
    else:
        logits = tl.load(logits_ptr + ids, mask=ids < V, other=0.0)
    tl.store(shaped_ptr + ids, tl.div_rn(logits - top, temperature), mask=ids < V)


@triton.jit
def _gather(
    shaped_ptr,
    keep_ptr,
    sums_count_ptr,
    sums_mass_ptr,
    state_ptr,
    found_ptr,
    candidates_ptr,
    slot_ptr,
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
    MASS: tl.constexpr,
    TURN: tl.constexpr,
    PART: tl.constexpr,
):
    part = tl.program_id(0)
    sample = tl.program_id(1)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    wanted = (tl.load(word_ptr + FLAGS) & (CUTS_TOP_P if MASS else CUTS_TOP_K)) != 0
    if (slot >= 0) & wanted:
        keep = tl.load(keep_ptr + sample)
        low, high, base, between, limit = _enter(
            TURN,
            sample,
            num_rows,
            word_ptr,
            keep,
            sums_count_ptr,
            sums_mass_ptr,
            state_ptr,
            C,
            LANES,
            M,
            K,
            STATE,
            LAUNCHES,
            MASS,
        )
        if part == 0:
            _leave(state_ptr, sample * LAUNCHES + TURN, low, high, base, between, limit, STATE)
        if (between <= M) & (high - low > 1):
            ids = part * PART + tl.arange(0, PART)
            keys = _load_keys(shaped_ptr + sample.to(tl.int64) * V, ids, V)
            mine = (keys >= low) & (keys < high) & (keys <= keep)
            ones = mine.to(tl.int32)
            num_mine = tl.sum(ones, axis=0)
            if num_mine > 0:
                # in any order: what is made of them are sums
                first = tl.atomic_add(found_ptr + sample, num_mine)
                place = first + tl.cumsum(ones, axis=0) - 1
                tl.store(candidates_ptr + sample * M + place, keys, mask=mine & (place < M))


@triton.jit
def _settle(
    shaped_ptr,
    keep_ptr,
    state_ptr,
    found_ptr,
    candidates_ptr,
    slot_ptr,
    counts_ptr,
    params_ptr,
    V: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    STATE: tl.constexpr,
    LAUNCHES: tl.constexpr,
    MASS: tl.constexpr,
    TURN: tl.constexpr,
    TILE: tl.constexpr,
):
    sample = tl.program_id(0)
    slot = slot_of(sample, slot_ptr, counts_ptr)
    word_ptr = params_ptr + tl.maximum(slot, 0).to(tl.int64) * W
    wanted = (tl.load(word_ptr + FLAGS) & (CUTS_TOP_P if MASS else CUTS_TOP_K)) != 0
    if (slot >= 0) & wanted:
        place = (sample * LAUNCHES + TURN) * STATE
        low = tl.load(state_ptr + place + LOW).to(tl.int32)
        high = tl.load(state_ptr + place + HIGH).to(tl.int32)
        base = tl.load(state_ptr + place + BASE)
        between = tl.load(state_ptr + place + NUM_BETWEEN)
        limit = tl.load(state_ptr + place + LIMIT).to(tl.float64, bitcast=True)
        if between <= M:
            candidate = tl.arange(0, M)
            there = candidate < between
            keys = tl.load(candidates_ptr + sample * M + candidate, mask=there, other=NO_KEY)
            weights = _weights(keys, there, MASS)
            while high - low > 1:
                middle = low + (high - low) // 2
                below = base + tl.sum(tl.where(keys < middle, weights, 0), axis=0)
                under = below.to(tl.float64) < limit
                low = tl.where(under, middle, low)
                high = tl.where(under, high, middle)
        else:
            # thousands of ids closer together than the pivots came: rare, and slow
            keep = tl.load(keep_ptr + sample)
            start = low
            while high - low > 1:
                middle = low + (high - low) // 2
                sums = tl.zeros([TILE], tl.int64)
                for first in range(0, V, TILE):
                    ids = first + tl.arange(0, TILE)
                    keys = _load_keys(shaped_ptr + sample.to(tl.int64) * V, ids, V)
                    inside = (keys >= start) & (keys < middle) & (keys <= keep)
                    sums += _weights(keys, inside, MASS)
                under = (base + tl.sum(sums, axis=0)).to(tl.float64) < limit
                low = tl.where(under, middle, low)
                high = tl.where(under, high, middle)
        tl.store(keep_ptr + sample, low)
        tl.store(found_ptr + sample, 0)


@triton.jit
def _weights(keys, there, MASS: tl.constexpr):
    if MASS:
        return tl.where(there, _mass(keys), 0)
    else:
        return there.to(tl.int64)


def cut(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    scratch: CutScratch,
    shaped_SV: Tensor,
    keep_S: Tensor,
) -> None:
    """Rows with cuts go to `shaped_SV`, their maximum at 0 and divided by the temperature.

    Of them the ids are kept whose magnitude has bits of at most `keep_S`; min_p is left to who
    draws. Adjusted rows are taken from `shaped_SV`, others from the logits.
    """
    num_samples, vocab_size = logits_SV.shape
    parts = triton.cdiv(vocab_size, PART)
    rows = (sample_slot_S, counts, slot_params_NW)
    sizes = {"V": vocab_size, "W": slot_params_NW.shape[1]}
    grid = (parts, num_samples)
    _top_of_part[grid](
        logits_SV,
        shaped_SV,
        scratch.top_SC,
        sample_index_S,
        *rows,
        **sizes,
        C=parts,
        PART=PART,
        num_warps=8,
    )
    bracket = {
        **sizes,
        "M": scratch.candidates_SM.shape[1],
        "STATE": STATE,
        "LAUNCHES": scratch.state_SL.shape[1],
    }
    split = {
        **bracket,
        "C": parts,
        "LANES": triton.next_power_of_2(parts),
        "K": PIVOTS,
        "PART": PART,
    }
    sums = (scratch.counts_2SCK, scratch.masses_2SCK, scratch.state_SL, scratch.found_S)
    num_rows = scratch.counts_2SCK.shape[1]
    for mass in (False, True):
        for turn in range(ROUNDS):
            _narrow[grid](
                logits_SV,
                shaped_SV,
                keep_S,
                scratch.top_SC,
                sample_index_S,
                *sums,
                *rows,
                num_rows,
                **split,
                MASS=mass,
                TURN=turn,
                TILE=TILE,
                num_warps=4,
            )
        _gather[grid](
            shaped_SV,
            keep_S,
            *sums,
            scratch.candidates_SM,
            *rows,
            num_rows,
            **split,
            MASS=mass,
            TURN=ROUNDS,
            num_warps=8,
        )
        _settle[(num_samples,)](
            shaped_SV,
            keep_S,
            scratch.state_SL,
            scratch.found_S,
            scratch.candidates_SM,
            *rows,
            **bracket,
            MASS=mass,
            TURN=ROUNDS,
            TILE=TILE,
            num_warps=8,
        )
