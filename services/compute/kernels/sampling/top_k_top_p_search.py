"""The search for a row's threshold: keys of ids, where a histogram says it lies, and its end among
few ids.

Shape legend: C parts of the vocabulary, B bins, M candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.sampling.lanes import NUM_LANES
from services.compute.kernels.sampling.sample_rows import (
    ADJUSTED,
    CUTS_TOP_K,
    CUTS_TOP_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_64,
    load_float,
)

STATE_WORDS = 4
GUESS_WORDS = 4
"""A search's state: the keys from which and below which its candidates are, and whether what it
sums is mass. A guess: where bins begin, the unit of their width, and the largest logit sampled."""

B = tl.constexpr(NUM_LANES)
STATE = tl.constexpr(STATE_WORDS)
GUESS = tl.constexpr(GUESS_WORDS)
LOW, HIGH, BY_MASS = map(tl.constexpr, range(3))
ORIGIN, UNIT, SAMPLED_TOP = map(tl.constexpr, range(3))
SHIFT = tl.constexpr(23 - 3)  # of a float's bits: 8 bins before their width doubles
BEFORE_1 = tl.constexpr((127 << 3) - 1)
LAST_UNIT = tl.constexpr(14.0)  # where the last bin begins
UNIT_OF_MASKED = tl.constexpr(15 / 16)
SECOND_UNIT = tl.constexpr(9 / 8)
NUM_SAMPLED = tl.constexpr(4096)
CROWD = tl.constexpr(64)  # of the sample: more than chance is, if they stand for
MAX_CROWD = tl.constexpr(2048)  # ids of the row
RUN = tl.constexpr(8)  # ids of 32 bytes, the least that is read
TILE_ROWS, COLUMNS, TILE = map(tl.constexpr, (4, 1024, 4096))
MOST_NATS = tl.constexpr(80.0)
SLOW_TILE = tl.constexpr(2048)
MASS_UNIT = tl.constexpr(2.0**40)  # as in the CPU's cuts
MASSLESS = tl.constexpr(0x41E00000)  # key of 28: exp(-28) is below one unit of mass
INFINITE = tl.constexpr(0x7F800000)
FRACTION = tl.constexpr(0x7FFFFF)
NO_KEY = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-3e38)
FAR = tl.constexpr(-1e30)  # in place of no least logit; a temperature divides it without overflow


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
def tile_at(first):
    """Ids of a tile from the first on; its rows are in the registers of the same threads."""
    return first + tl.arange(0, TILE_ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_logits(row, ids, V: tl.constexpr):
    """Logits of these ids, as they came or processed; beyond the vocabulary below all others."""
    logits_ptr, adjusted_ptr, adjusted = row
    if adjusted:
        logits = tl.load(adjusted_ptr + ids, mask=ids < V, other=-float("inf"))
    else:
        logits = tl.load(logits_ptr + ids, mask=ids < V, other=-float("inf"))
    return logits


@triton.jit
def row_of(sample, logits_ptr, adjusted_ptr, flags, V: tl.constexpr):
    """A row's logits as they came and processed, and which of them count."""
    start = sample.to(tl.int64) * V
    return logits_ptr + start, adjusted_ptr + start, (flags & ADJUSTED) != 0


@triton.jit
def _divided(differences, temperature, FAST: tl.constexpr):
    """Differences by the temperature, rounded as a division.

    The remainder corrects the product with the inverse to the nearest quotient, unless all bits of
    the divisor's fraction are set (Markstein, 1990); that takes half of a division's instructions.
    """
    divisor = tl.zeros_like(differences) + temperature
    if FAST and (temperature.to(tl.int32, bitcast=True) & FRACTION) != FRACTION:
        inverse = tl.div_rn(1.0, temperature)
        about = differences * inverse
        nearest = tl.fma(tl.fma(-about, divisor, differences), inverse, about)
        quotients = tl.where(about == -float("inf"), about, nearest)
    else:
        quotients = tl.div_rn(differences, divisor)
    return quotients


@triton.jit
def key_of(logits, top, temperature, FAST: tl.constexpr = False):
    """Keys of logits."""
    scaled = _divided(logits - top, temperature, FAST)
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_keys(row, ids, top, temperature, V: tl.constexpr, FAST: tl.constexpr = False):
    """Keys of these ids; beyond the vocabulary above all others."""
    return tl.where(ids < V, key_of(load_logits(row, ids, V), top, temperature, FAST), NO_KEY)


@triton.jit
def first_high(by_mass):
    """Above any threshold, among keys of some mass if mass is what is searched by."""
    return tl.where(by_mass, MASSLESS, INFINITE + 1)


@triton.jit
def load_bracket(state_ptr):
    """Low, high, and whether sums are of mass."""
    by_mass = tl.load(state_ptr + BY_MASS) != 0
    return tl.load(state_ptr + LOW), tl.load(state_ptr + HIGH), by_mass


@triton.jit
def goes_on(flags, word_ptr, M: tl.constexpr):
    """Whether top_p is to be searched for among the few ids that top_k keeps."""
    both = ((flags & CUTS_TOP_P) != 0) & ((flags & CUTS_TOP_K) != 0)
    return both & (tl.load(word_ptr + TOP_K) <= M)


@triton.jit
def _ordered(values):
    """Integers in the order of floats, and back."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _floats(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _value_above(ordered, weights, wanted, low, high):
    """About the largest value from which on upwards there is the wanted weight; at least `low`."""
    for _ in range(16):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = tl.sum(tl.where(ordered >= middle, weights, 0.0), axis=0)
        low = tl.where(above >= wanted, middle, low)
        high = tl.where(above >= wanted, high, middle)
    return _floats(low)


@triton.jit
def guess(row, flags, word_ptr, guess_ptr, V: tl.constexpr):
    """Lay the bins by a sample of the row: from a little below where its threshold would lie.

    What comes of it decides how many candidates there are, and not which id is the last one kept.
    """
    place = tl.arange(0, NUM_SAMPLED)
    apart: tl.constexpr = max(V // (NUM_SAMPLED // RUN) // RUN * RUN, RUN)
    ratio: tl.constexpr = V / min(V, NUM_SAMPLED)
    values = load_logits(row, place // RUN * apart + place % RUN, V)
    there = (values > LEAST) & (values < float("inf"))
    top = tl.max(tl.where(there, values, LEAST), axis=0)
    ordered = _ordered(tl.where(there, values, LEAST))
    low = tl.min(tl.where(there, ordered, _ordered(top)), axis=0)
    high = _ordered(top) + 1
    weights = there.to(tl.float32)
    few: tl.constexpr = min(CROWD, max(MAX_CROWD * min(V, NUM_SAMPLED) // V, 2 * RUN))
    crowd = _value_above(ordered, weights, few, low, high)
    if (flags & CUTS_TOP_K) == 0:
        # the likeliest few are no sample: they weigh what the likeliest but few do
        beyond = tl.maximum(crowd - tl.where(there, values, crowd), 0.0)
        weights = tl.where(there, tl.exp(-beyond / load_float(word_ptr + TEMPERATURE)), 0.0)
        top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True).to(tl.float32)
        wanted = tl.sum(weights, axis=0) * (0.5 + 0.5 * top_p)
    else:
        rank = tl.load(word_ptr + TOP_K).to(tl.float32) / ratio
        wanted = rank + 3.0 * tl.sqrt(rank) + 2.0 * RUN
    begin = _value_above(ordered, weights, wanted, low, high)
    least = tl.maximum(tl.abs(top) * 2.0**-12, 2.0**-12)
    unit = tl.maximum(tl.maximum(crowd - begin, (top - begin) / 8.0) / 8.0, least)
    tl.store(guess_ptr + ORIGIN, begin - unit / 8.0)  # the second bin's
    tl.store(guess_ptr + UNIT, unit)
    tl.store(guess_ptr + SAMPLED_TOP, top)


@triton.jit
def units_of(logits, origin, per_unit):
    """Where logits lie above the origin, as floats whose upper bits number the bins.

    Bin 0 is of what is masked, bin 1 of what lies below the bins, and their beginning. The next
    bins are 1/8 unit wide, those beyond the first unit twice that, those beyond the third four
    times, and so on; in the last one is all above it too.
    """
    units = tl.minimum(tl.maximum((logits - origin) * per_unit + 1.0, 1.0), LAST_UNIT)
    return tl.where(logits == -float("inf"), UNIT_OF_MASKED, units)


@triton.jit
def bin_of(logits, origin, per_unit):
    """The number of the logits' bins."""
    units = units_of(logits, origin, per_unit)
    return (units.to(tl.int32, bitcast=True) >> SHIFT) - BEFORE_1


@triton.jit
def rough_mass(logits, sampled_top, temperature):
    """Mass in float32, of which an id at the largest logit sampled has 1."""
    return tl.exp(tl.minimum((logits - sampled_top) * (1.0 / temperature), MOST_NATS))


@triton.jit
def _begin_of(bins, origin, unit):
    """The least logit of each bin."""
    units = ((bins + BEFORE_1) << SHIFT).to(tl.float32, bitcast=True)
    return tl.where(bins > 1, origin + (units - 1.0) * unit, FAR)


@triton.jit
def _at(bins, number, values):
    """The value of this bin."""
    return tl.sum(tl.where(bins == number, values, 0), axis=0)


@triton.jit
def _masses_of(bins, counts, begins, ends, top, top_bin, temperature):
    """Of bins: the least mass that their ids may have, the most, and that if they lie evenly."""
    least = tl.exp((tl.minimum(begins, top) - top) / temperature)
    most = tl.exp((tl.minimum(ends, top) - top) / temperature)
    width = (ends - begins) / temperature
    even = tl.where(width > 1e-2, (most - least) / tl.maximum(width, 1e-2), (most + least) * 0.5)
    # one id at least has the maximum
    least = least * counts + tl.where(bins == top_bin, 1.0 - least, 0.0)
    return least, tl.where(bins > 0, most * counts, 0.0), even * counts


@triton.jit
def _last_with(bins, holds):
    """The likeliest bin of which it holds; the first if it does of none."""
    return tl.max(tl.where(holds, bins, 0), axis=0)


@triton.jit
def _logit_at(bins, counts, above, begins, ends, count):
    """Above which logit there are so many ids, if those of a bin lie evenly; within the bins."""
    here = _last_with(bins, above + counts >= count)
    share = (count - _at(bins, here, above)) / tl.maximum(_at(bins, here, counts), 1.0)
    begin, end = _at(bins, here, begins), _at(bins, here, ends)
    between = end - tl.minimum(tl.maximum(share, 0.0), 1.0) * (end - begin)
    return tl.where(here > 1, between, end)


@triton.jit
def _by_mass(bins, counts, above, begins, ends, top, total, rest, top_bin, word_ptr):
    """The first and the last bin where a threshold by mass may lie; ids before where it should."""
    temperature = load_float(word_ptr + TEMPERATURE)
    top_p = load_64(word_ptr + TOP_P).to(tl.float64, bitcast=True).to(tl.float32)
    missing = 1.0 - top_p
    least, most, even = _masses_of(bins, counts, begins, ends, top, top_bin, temperature)
    least_from = tl.cumsum(least, axis=0, reverse=True)
    most_from = tl.cumsum(most, axis=0, reverse=True)
    least_below = tl.cumsum(least, axis=0) - least
    most_below = tl.cumsum(most, axis=0) - most
    first = _last_with(bins, missing * least_from >= top_p * most_below * (1.0 + 1e-5))
    last = _last_with(bins, missing * most_from * (1.0 + 1e-5) >= top_p * least_below)
    # from below, where bins are narrow
    even = tl.where(bins > 1, even, tl.where(bins == 1, rest, 0.0))
    below = tl.cumsum(even, axis=0) - even
    here = _last_with(bins, below <= missing * total)
    share = (missing * total - _at(bins, here, below)) / tl.maximum(_at(bins, here, even), 1e-30)
    share = 1.0 - tl.minimum(tl.maximum(share, 0.0), 1.0)
    return first, last, _at(bins, here, above) + share * _at(bins, here, counts)


@triton.jit
def bracket(counts, top, total, rest, flags, word_ptr, guess_ptr, M: tl.constexpr):
    """From which key and below which one the candidates are, by the counts of a row's bins; and
    whether what is searched by is mass.

    All bins in which the threshold may lie, if there are few ids in them; else as many ids as there
    is room for, around where it should lie.
    """
    bins = tl.arange(0, B)
    origin, unit = tl.load(guess_ptr + ORIGIN), tl.load(guess_ptr + UNIT)
    begins = _begin_of(bins, origin, unit)
    ends = tl.where(bins < B - 1, _begin_of(bins + 1, origin, unit), top)
    ends = tl.maximum(tl.minimum(ends, top), begins)
    counts = counts.to(tl.float32)
    above = tl.cumsum(counts, axis=0, reverse=True) - counts
    centre = tl.load(word_ptr + TOP_K).to(tl.float32)
    first = _last_with(bins, above + counts >= centre)
    last = first
    # where masks leave fewer ids than top_k would, it takes none away
    by_mass = ((flags & CUTS_TOP_K) == 0) | (((flags & CUTS_TOP_P) != 0) & (first == 0))
    temperature = load_float(word_ptr + TEMPERATURE)
    if by_mass:
        to_unit = tl.exp((tl.load(guess_ptr + SAMPLED_TOP) - top) / temperature)
        total, rest = total * to_unit, rest * to_unit
        top_bin = bin_of(top, origin, 1.0 / unit)
        first, last, centre = _by_mass(
            bins, counts, above, begins, ends, top, total, rest, top_bin, word_ptr
        )
    most_ids, fewest = _at(bins, first, above + counts), _at(bins, last, above)
    begin, end = _at(bins, first, begins), _at(bins, last, ends)
    if most_ids - fewest > M:
        room: tl.constexpr = M // 4  # counts of wide bins are off by a few hundred
        lower = _logit_at(bins, counts, above, begins, ends, centre + room)
        upper = _logit_at(bins, counts, above, begins, ends, tl.maximum(centre - room, 0.0))
        begin, end = tl.maximum(begin, lower), tl.minimum(end, upper)
    low, high = _keys_between(begin, end, origin, unit, top, temperature)
    high = tl.minimum(high, first_high(by_mass))
    low = tl.minimum(low, high - 1)
    from_zero = (not by_mass) & goes_on(flags, word_ptr, M) & (most_ids <= M)
    low = tl.where(from_zero, 0, low)
    is_masked = (not by_mass) & (first == 0)
    low, high = tl.where(is_masked, INFINITE, low), tl.where(is_masked, INFINITE + 1, high)
    return low, high, by_mass


@triton.jit
def _keys_between(begin, end, origin, unit, top, temperature):
    """Keys of logits from `begin` to `end`, and a little more, since ends of bins are rounded."""
    begin -= (tl.abs(begin) + tl.abs(origin) + tl.abs(begin - origin) * 4.0 + unit) * 2.0**-22
    end += (tl.abs(end) + tl.abs(origin) + tl.abs(end - origin) * 4.0 + unit) * 2.0**-22
    low = key_of(tl.minimum(end, top), top, temperature)
    high = key_of(tl.minimum(tl.maximum(begin, FAR), top), top, temperature) + 1
    return low, tl.where(begin <= FAR, INFINITE, high)


@triton.jit
def bisect(keys, weights, low, high, base, limit):
    """The largest key in the bracket with less than the limit before it."""
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + tl.sum(tl.where(keys < middle, weights, 0), axis=0)
        under = below.to(tl.float64) < limit
        low = tl.where(under, middle, low)
        high = tl.where(under, high, middle)
    return low


@triton.jit
def sum_row(row, top, temperature, low, middle, by_mass, V: tl.constexpr):
    """How many of a row's keys are from low up to the middle, or their mass."""
    sums = tl.zeros([SLOW_TILE], tl.int64)
    for first in range(0, V, SLOW_TILE):
        ids = first + tl.arange(0, SLOW_TILE)
        keys = load_keys(row, ids, top, temperature, V)
        weights = tl.where(by_mass, mass(keys), 1)
        sums += tl.where((keys >= low) & (keys < middle), weights, 0)
    return tl.sum(sums, axis=0)


@triton.jit
def bisect_row(row, top, temperature, low, high, base, limit, by_mass, V: tl.constexpr):
    """As `bisect`, over a whole row: rare, and slow."""
    start = low
    while high - low > 1:
        middle = low + (high - low) // 2
        below = base + sum_row(row, top, temperature, start, middle, by_mass, V)
        under = below.to(tl.float64) < limit
        low = tl.where(under, middle, low)
        high = tl.where(under, high, middle)
    return low
