"""Drafts: which of a step's were right, and those for the next, in one launch behind the draws.

A program for each sample that begins a slot's rows. It accepts drafts as `speculative.acceptance`
does and looks for new ones as `speculative.ngram`, in the tokens of its slot, to which it first
adds those that count, and in the prediction at their end. It reads all tokens so far as often as
they may be alike, unless it follows the prediction. For a drafter that computes it leaves the
drafts open, and notes up to where that has read what is now the text (`draft_passes`).

Shape legend: S samples, N slots, L positions, K drafts of a row, W words of a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.sample_rows import FLAGS, NUM_WORDS, slot_of
from services.compute.kernels.sampling.slot_entries import ENTRY_INTS, HEADER_INTS, PLACES
from services.compute.kernels.step import slot_words as words
from services.compute.kernels.step.slot_words import SampleRows
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, Resident, StepInputs
from services.compute.step import BoolArray, Int32Array

NO_DRAFT = -1
DRAFT_WORDS = 2
"""The last words of a result: whether its row counts; and how many drafts the slot has now, with
what they are from (`speculative.draft_counts.DRAFTERS`) above bit FOUND_BY_SHIFT. Before them
are the drafts, where those are said to the host."""
FOUND_BY_SHIFT = 8

_NUM_DECODE_ROWS = tl.constexpr(NUM_DECODE_ROWS)
_DRAFTS_FLAG = tl.constexpr(words.DRAFTS)
_PENALISED = tl.constexpr(words.PENALISED)
_HEADER, _ENTRY = tl.constexpr(HEADER_INTS), tl.constexpr(ENTRY_INTS)
_SLOT, _COUNTED, _NUM_PROMPT, _NUM_OUTPUT, _NUM_BIAS, _NUM_STOPS, _START, _DRAFTS = map(
    tl.constexpr, PLACES
)
_FOUND_BY_SHIFT = tl.constexpr(FOUND_BY_SHIFT)
_POSITION_BITS = tl.constexpr(24)
_POSITION_MASK = tl.constexpr((1 << 24) - 1)
_BLOCK = 1024
_ENTRY_PROGRAMS = 32


class DraftRule(NamedTuple):
    """What drafts there are, and which are right."""

    num_drafts: int
    least_alike: int
    most_alike: int
    rate: float = -1.0  # of drafts that count as right though they are not; below 0: none do
    found_by: int = 0  # which of `speculative.draft_counts.DRAFTERS` computes them, if one does
    says: bool = False  # to the host, as the last of several stages

    @property
    def result_words(self) -> int:
        return DRAFT_WORDS + self.says * self.num_drafts


class SlotTexts(NamedTuple):
    """The tokens of every slot, with its prediction at their end, and where the prediction begins
    and is followed up to (`speculative.ngram.Stand`; -1 - place where it was left)."""

    ids_NL: Tensor  # int32
    stands_N2: Tensor  # int32

    @staticmethod
    def make(num_slots: int, max_positions: int, device: torch.device) -> SlotTexts:
        """134 MB for 256 slots of 131,072 positions."""
        ids_NL = torch.zeros((num_slots, max_positions + 1), dtype=torch.int32, device=device)
        return SlotTexts(ids_NL, ids_NL.new_zeros((num_slots, 2)))


@triton.jit
def _is_lucky(index, slot, THRESHOLD: tl.constexpr):
    """A number by output index and slot below a threshold: `acceptance.accepted_synthetic`."""
    mixed = index.to(tl.uint32) * 0x9E3779B1 + slot.to(tl.uint32) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = mixed ^ (mixed >> 12)
    return mixed.to(tl.int64) < THRESHOLD


@triton.jit
def _accept(
    sample, slot, rows, inputs, resident, result_ptr,
    W: tl.constexpr, K: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """How many of a slot's rows count, from its first one on."""
    num_decodes = tl.load(rows.counts + _NUM_DECODE_ROWS)
    drafts_ptr = resident.drafts_NK + slot * (K + 1)
    accepted = tl.load(result_ptr + sample * W + W - 2)  # 0 where nothing is drawn
    count = accepted
    for number in tl.static_range(1, K + 1):
        row = sample + number
        inside = (row < num_decodes) & (sample < num_decodes)
        there = tl.load(inputs.row_number_R + row, mask=inside, other=0) == number
        draft = tl.load(drafts_ptr + number - 1)
        drawn = tl.load(result_ptr + (row - 1) * W)
        right = draft == drawn
        if THRESHOLD >= 0:
            index = tl.load(rows.index_S + row, mask=inside, other=0)
            right = (draft >= 0) & _is_lucky(index, slot, THRESHOLD)
        accepted = accepted & (there & right).to(tl.int32)
        # 2 says that there was a draft, whether it was right or not
        offered = 2 * (draft >= 0).to(tl.int32)
        tl.store(result_ptr + row * W + W - 2, accepted + offered, mask=inside & there)
        count += accepted
    return count


@triton.jit
def _scan(
    ids_ptr, begin, stop, end, ahead, best,
    L: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of `best` and the places begin .. stop, which end as ids 0 .. end do: of those with
    most ids alike the first one beyond `ahead`, or else the last."""
    lanes = tl.arange(0, BLOCK)
    for first in range(begin, stop, BLOCK):
        place = first + lanes
        alike = tl.zeros([BLOCK], tl.int32)
        same = place < stop
        for back in tl.static_range(MOST):
            inside = same & (place - back >= begin) & (end >= back)
            last = tl.load(ids_ptr + end - back, mask=end >= back, other=-1)
            same = inside & (tl.load(ids_ptr + place - back, mask=inside, other=-2) == last)
            alike += same.to(tl.int32)
        rank = tl.where(place > ahead, 2 * L - place, place)
        found = (alike << _POSITION_BITS) | rank
        best = tl.maximum(best, tl.where(alike >= LEAST, found, 0))
    return best


@triton.jit
def _look_up(
    ids_ptr, start, stood, place, end, stand_ptr, drafts_ptr,
    L: tl.constexpr, K: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draft what follows ids 0 .. end, from the prediction at `start`, where that is followed up to
    `place`; else from where the text stood before. Returns what a result says of it."""
    if place < 0:
        anchor = tl.where(stood < 0, -1 - stood, stood)
        ahead = tl.maximum(anchor, end)
        best = tl.zeros([BLOCK], tl.int32)
        best = _scan(ids_ptr, 0, end, end, ahead, best, L, LEAST, MOST, BLOCK)
        first = tl.maximum(start, end + 1)
        best = _scan(ids_ptr, first, L - 1, end, ahead, best, L, LEAST, MOST, BLOCK)
        found = tl.max(best, axis=0)
        rank = found & _POSITION_MASK
        place = tl.where(found > 0, tl.where(rank > L, 2 * L - rank, rank), -1)
        tl.store(stand_ptr + 1, tl.where(place > end, place, -1 - anchor))
    else:
        tl.store(stand_ptr + 1, place)
    is_predicted = place > end
    stop = tl.where(is_predicted, L, end + 1)
    count = tl.where(place >= 0, tl.minimum(K, stop - 1 - place), 0)
    for number in tl.static_range(K):
        there = number < count
        draft = tl.load(ids_ptr + place + 1 + number, mask=there, other=-1)
        tl.store(drafts_ptr + number, draft)
    return count | is_predicted.to(tl.int32) << _FOUND_BY_SHIFT


@triton.jit
def _followed(
    ids_ptr, stood, sample, count, result_ptr, L: tl.constexpr, W: tl.constexpr, K: tl.constexpr
):
    """Where the prediction is followed up to, with `count` ids more; -1 if it is not."""
    follows = (stood >= 0) & (stood + count < L - 1)
    for drawn in tl.static_range(K + 1):
        new = follows & (drawn < count)
        token = tl.load(result_ptr + (sample + drawn) * W, mask=new, other=0)
        predicted = tl.load(ids_ptr + stood + 1 + drawn, mask=new, other=0)
        follows = follows & (token == predicted)
    return tl.where(follows, stood + count, -1)


@triton.jit
def _draft_tokens(
    rows, inputs, resident, ids_ptr, stands_ptr, read_ptr, said_ptr, result_ptr,
    V: tl.constexpr, L: tl.constexpr, W: tl.constexpr, K: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, THRESHOLD: tl.constexpr, OPEN: tl.constexpr, COMPUTES: tl.constexpr,
    LEFT: tl.constexpr, SAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0)
    slot = slot_of(sample, rows).to(tl.int64)
    num_decodes = tl.load(rows.counts + _NUM_DECODE_ROWS)
    number = tl.load(inputs.row_number_R + sample)
    if (slot >= 0) & ((number == 0) | (sample >= num_decodes)):
        count = _accept(sample, slot, rows, inputs, resident, result_ptr, W, K, THRESHOLD)
        end = tl.load(resident.length + slot) + count
        index = tl.load(resident.output_index + slot) + count
        flags = tl.load(rows.params_NW + slot * NUM_WORDS + FLAGS)
        num_found = 0
        drafts_ptr = resident.drafts_NK + slot * (K + 1)
        ids_ptr += slot * L
        stand_ptr = stands_ptr + slot * 2
        stood = tl.load(stand_ptr + 1)
        read = 0
        if COMPUTES:
            read = tl.load(read_ptr + slot)
        tl.debug_barrier()  # all threads have read what one of them writes now
        if count > 0:
            tl.store(resident.length + slot, end)
            tl.store(resident.output_index + slot, index)
            last = tl.load(result_ptr + (sample + count - 1) * W)
            tl.store(resident.last_token + slot, last)
        if (flags & _PENALISED) != 0:
            for drawn in tl.static_range(K + 1):
                new = drawn < count
                token = tl.load(result_ptr + (sample + drawn) * W, mask=new, other=0)
                tl.atomic_add(said_ptr + slot * V + token, 1, mask=new)
        if (flags & _DRAFTS_FLAG) != 0:
            if not COMPUTES:
                place = _followed(ids_ptr, stood, sample, count, result_ptr, L, W, K)
                start = tl.load(stand_ptr)
            tl.debug_barrier()  # what was predicted is overwritten only now
            for drawn in tl.static_range(K + 1):
                new = drawn < count
                token = tl.load(result_ptr + (sample + drawn) * W, mask=new, other=0)
                tl.store(ids_ptr + end - count + 1 + drawn, token, mask=new)
            tl.debug_barrier()  # what was stored is read by all threads
            if COMPUTES:
                num_found = OPEN
                for draft in tl.static_range(K):
                    tl.store(drafts_ptr + draft, -1)
                # What it read of its drafts counts as far as they were right; before a swap none.
                known = tl.where(read < 0, tl.maximum(end - count - LEFT, 0), read)
                tl.store(read_ptr + slot, tl.minimum(known, end))
            elif THRESHOLD >= 0:
                num_found = K
                token = tl.load(ids_ptr + end)
                for draft in tl.static_range(K):
                    tl.store(drafts_ptr + draft, token)
            else:
                num_found = _look_up(
                    ids_ptr, start, stood, place, end, stand_ptr, drafts_ptr,
                    L, K, LEAST, MOST, BLOCK,
                )  # fmt: skip
        else:
            for draft in tl.static_range(K):
                tl.store(drafts_ptr + draft, -1)
        tl.store(result_ptr + sample * W + W - 1, num_found)
        if SAYS:
            tl.debug_barrier()  # as above
            for word in tl.static_range(K):
                guess = tl.load(drafts_ptr + word)
                tl.store(result_ptr + sample * W + W - 2 - K + word, guess)


def draft_tokens(
    rows: SampleRows,
    inputs: StepInputs,
    resident: Resident,
    texts: SlotTexts,
    said_NV: Tensor,
    rule: DraftRule,
    result_SW: Tensor,
    read_N: Tensor | None = None,
) -> None:
    """Accept drafts by the draws in `result_SW`, advance their slots, count what penalties have to
    know, and draft for the next step.

    Behind `sample_tokens`, which with drafts leaves the slots as they are and writes to the second
    last word whether a sample draws. There it is now whether the row counts, with 2 added where its
    input was a draft; and in the last word of a slot's first row what drafts there are, before both
    if the rule says them. With `read_N`, how much a drafter has read, none has been computed yet.
    """
    num_samples, width = result_SW.shape
    threshold = -1 if rule.rate < 0.0 else int(rule.rate * (1 << 32))
    _draft_tokens[(num_samples,)](
        rows,
        inputs,
        resident,
        texts.ids_NL,
        texts.stands_N2,
        texts.stands_N2 if read_N is None else read_N,
        said_NV,
        result_SW,
        V=said_NV.shape[1],
        L=texts.ids_NL.shape[1],
        W=width,
        K=rule.num_drafts,
        LEAST=rule.least_alike,
        MOST=rule.most_alike,
        THRESHOLD=threshold,
        OPEN=rule.num_drafts | rule.found_by << FOUND_BY_SHIFT,
        COMPUTES=read_N is not None,
        LEFT=rule.num_drafts + words.MOST_PLAIN,
        SAYS=rule.says,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _remember(
    packed, ids_ptr, stands_ptr, read_ptr, L: tl.constexpr, COMPUTES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    for number in range(tl.program_id(0), tl.load(packed), NUM_PROGRAMS):
        entry = packed + _HEADER + number * _ENTRY
        slot = tl.load(entry + _SLOT).to(tl.int64)
        num_ids = tl.load(entry + _NUM_PROMPT) + tl.load(entry + _NUM_OUTPUT)
        drafts = tl.load(entry + _DRAFTS)
        first_ptr = packed + tl.load(entry + _START)
        num_others = 2 * tl.load(entry + _NUM_BIAS) + tl.load(entry + _NUM_STOPS)
        predicted_ptr = first_ptr + num_ids + num_others
        num_ids = num_ids * (drafts != 0).to(tl.int32)
        ids_of_slot = ids_ptr + slot * L
        for first in range(0, num_ids, BLOCK):
            place = first + lanes
            ids = tl.load(first_ptr + place, mask=place < num_ids, other=0)
            tl.store(ids_of_slot + place, ids, mask=place < num_ids)
        num_predicted = tl.maximum(drafts - 1, 0)
        start = L - num_predicted
        for first in range(0, num_predicted, BLOCK):
            place = first + lanes
            ids = tl.load(predicted_ptr + place, mask=place < num_predicted, other=0)
            tl.store(ids_of_slot + start + place, ids, mask=place < num_predicted)
        if COMPUTES:
            tl.store(read_ptr + slot, -1)
        tl.store(stands_ptr + slot * 2, start)
        tl.store(stands_ptr + slot * 2 + 1, tl.where(num_predicted > 0, start - 1, -start))


def remember_tokens(packed: Tensor, texts: SlotTexts, read_N: Tensor | None = None) -> None:
    """Take what new sequences that draft have in `packed`; how much of it was read is unknown."""
    _remember[(_ENTRY_PROGRAMS,)](
        packed,
        texts.ids_NL,
        texts.stands_N2,
        texts.stands_N2 if read_N is None else read_N,
        L=texts.ids_NL.shape[1],
        COMPUTES=read_N is not None,
        NUM_PROGRAMS=_ENTRY_PROGRAMS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def unpack_drafts(
    result_SW: Int32Array,
) -> tuple[BoolArray, Int32Array, Int32Array, Int32Array]:
    """Which rows count, which had a draft, how many drafts the slots of first rows have, and what
    those are from."""
    word_S, found_S = result_SW[:, -2], result_SW[:, -1]
    num_found_S, found_by_S = found_S & ((1 << FOUND_BY_SHIFT) - 1), found_S >> FOUND_BY_SHIFT
    return (word_S & 1) != 0, word_S >> 1, num_found_S, found_by_S


def said_drafts(result_SW: Int32Array, num_drafts: int) -> Int32Array:
    """The drafts of first rows' slots."""
    return result_SW[:, -DRAFT_WORDS - num_drafts : -DRAFT_WORDS].copy()
