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

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels import slot_words as words
from services.compute.kernels.sample_rows import (
    ADJUSTED,
    CUT,
    CUTS_TOP_K,
    CUTS_TOP_P,
    TEMPERATURE,
    load_float,
    settings_of,
)
from services.compute.kernels.step_buffers import NUM_SAMPLES
from services.compute.kernels.top_k_top_p_search import (
    INFINITE,
    enter,
    even_pivots,
    first_high,
    first_pivots,
    goes_on,
    is_wide,
    load_keys,
    load_logits,
    mass,
    row_top,
    settle,
)

PART = 4096
PIVOTS = 8
ROUNDS = 3
STATE = 8
"""Words of a search's state, of which low, high, the sum below low, the ids between the two, and
the limit of the sum are used."""

MAX_CANDIDATES = 4096


@dataclass(frozen=True, slots=True)
class TopKTopPScratch:
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
        parts = -(-vocab_size // PART)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return TopKTopPScratch(
            zeros(max_samples, parts, dtype=torch.float32),
            zeros(2, max_samples, parts, PIVOTS),
            zeros(2, max_samples, parts, PIVOTS, dtype=torch.int64),
            zeros(max_samples, ROUNDS + 1, STATE, dtype=torch.int64),
            zeros(max_samples),
            zeros(max_samples, max_candidates),
        )


ONE_ID = tl.constexpr(1 << 52)  # count and mass of up to 2048 ids fit one word
MASS_MASK = tl.constexpr((1 << 52) - 1)

TILE = 2048


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
    slot, word_ptr, flags = settings_of(sample, slot_ptr, index_ptr, counts_ptr, params_ptr, W)
    if (slot >= 0) & ((flags & CUT) != 0):
        row = sample.to(tl.int64) * V
        ids = part * PART + tl.arange(0, PART)
        adjusted = (flags & ADJUSTED) != 0
        logits = load_logits(logits_ptr + row, adjusted_ptr + row, ids, adjusted, V)
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
    slot, word_ptr, flags = settings_of(sample, slot_ptr, index_ptr, counts_ptr, params_ptr, W)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        by_mass = (flags & CUTS_TOP_K) == 0
        if TURN == 0:
            low = tl.zeros_like(sample)
            high = first_high(by_mass)
            pivots = first_pivots(high, K)
            wide = high > 0
        else:
            from_zero = goes_on(flags, word_ptr, M)
            low, high, base, between, limit = enter(
                TURN, num_rows, sample, word_ptr, by_mass, from_zero,
                sums_count_ptr, sums_mass_ptr, state_ptr, C, LANES, M, K, STATE, LAUNCHES,
            )  # fmt: skip
            pivots = even_pivots(low, high, K)
            wide = is_wide(low, high, base, between, from_zero, M)
        if wide:
            row = sample.to(tl.int64) * V
            place = ((TURN % 2 * num_rows + sample) * C + part) * K
            _sum_below(
                logits_ptr + row, adjusted_ptr + row, sums_count_ptr + place, sums_mass_ptr + place,
                part * PART, (flags & ADJUSTED) != 0, row_top(top_ptr + sample * C, C, LANES),
                load_float(word_ptr + TEMPERATURE), low, pivots, by_mass, V, K, PART, TILE,
            )  # fmt: skip


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
        keys = load_keys(logits_ptr, adjusted_ptr, ids, adjusted, top, temperature, V)
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
    slot, word_ptr, flags = settings_of(sample, slot_ptr, index_ptr, counts_ptr, params_ptr, W)
    if (slot >= 0) & ((flags & (CUTS_TOP_K | CUTS_TOP_P)) != 0):
        from_zero = goes_on(flags, word_ptr, M)
        low, high, base, between, limit = enter(
            TURN, num_rows, sample, word_ptr, (flags & CUTS_TOP_K) == 0, from_zero,
            sums_count_ptr, sums_mass_ptr, state_ptr, C, LANES, M, K, STATE, LAUNCHES,
        )  # fmt: skip
        held = between + tl.where(from_zero, base, 0)
        if (held <= M) & ((high - low > 1) | from_zero):
            row = sample.to(tl.int64) * V
            keys = load_keys(
                logits_ptr + row, adjusted_ptr + row, part * PART + tl.arange(0, PART),
                (flags & ADJUSTED) != 0, row_top(top_ptr + sample * C, C, LANES),
                load_float(word_ptr + TEMPERATURE), V,
            )  # fmt: skip
            mine = (keys >= tl.where(from_zero, 0, low)) & (keys < high)
            ones = mine.to(tl.int32)
            num_mine = tl.sum(ones, axis=0)
            if num_mine > 0:
                # in any order: what is made of them are sums
                first = tl.atomic_add(found_ptr + sample, num_mine)
                place = first + tl.cumsum(ones, axis=0) - 1
                tl.store(candidates_ptr + sample * M + place, keys, mask=mine & (place < M))


def top_k_top_p(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    scratch: TopKTopPScratch,
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
    settle[(num_samples,)](
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


HOST_MASS_UNIT = 2.0**40


def top_k_top_p_reference(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    adjusted_SV: Tensor,
    keep_S: Tensor,
    top_S: Tensor,
) -> None:
    """As the kernel's; keys are of float32 whatever the logits are."""
    for sample in range(int(counts[NUM_SAMPLES])):
        slot = int(sample_slot_S[sample])
        row_W = slot_params_NW[max(slot, 0)].cpu().numpy()
        if slot < 0 or not row_W[words.FLAGS] & words.CUT:
            continue
        early = int(sample_index_S[sample]) < row_W[words.MIN_TOKENS]
        adjusted = bool(
            row_W[words.FLAGS] & (words.ADJUSTED if early else words.ADJUSTED & ~words.HAS_STOPS)
        )
        logits = (adjusted_SV if adjusted else logits_SV)[sample].cpu()
        temperature = row_W.view(np.float32)[words.TEMPERATURE].item()
        top_S[sample] = logits.max()
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
        keep_S[sample] = int(np.float32(-keep).view(np.int32)) & 0x7FFFFFFF
