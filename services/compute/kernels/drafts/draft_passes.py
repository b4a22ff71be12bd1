"""Passes of a small model that drafts: which rows each has, and where its guesses go.

A step whose rows want drafts goes `begin_drafts`, which finds them; where something has not been
read yet, `plan_reading` and a pass over that; then for each draft `plan_pass`, a pass, draws, and
`keep_guesses`. All sizes are read on the device, as are lengths: the host knows how many passes
there are, and no token.

The first pass has two rows of each slot, the last token and the one before it: a draft that was
right at the end of a row has not been read by then. Weights are read once for both.

Shape legend: T tokens, R rows, N slots, L positions, D slots that are drafted for, K drafts of a
row, S samples, W words of a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.step.step_buffers import (
    NO_SLOT,
    NUM_DECODE_ROWS,
    Resident,
    StepInputs,
)

_NUM_DECODE_ROWS = tl.constexpr(NUM_DECODE_ROWS)
_NO_SLOT = tl.constexpr(NO_SLOT)
_BLOCK = 128


class DraftPasses(NamedTuple):
    """What is drafted for, from pass to pass, and what the drafter has read."""

    slot_D: Tensor  # int32
    num_drafts_D: Tensor  # int32, wanted; 0 for a slot whose text has not been read so far
    state: Tensor  # int32 [3]: how many slots, the number of the pass, and 1 behind a reading
    read_N: Tensor  # int32, positions that are there, from the first on; -1 before the first draw

    @staticmethod
    def make(num_slots: int, max_rows: int, device: torch.device) -> DraftPasses:
        slot_D = torch.zeros(max_rows, dtype=torch.int32, device=device)
        return DraftPasses(slot_D, slot_D.clone(), slot_D.new_zeros(3), slot_D.new_zeros(num_slots))


class SmallSizes(NamedTuple):
    """Of what a drafter works on."""

    page_tokens: int
    vocab_size: int  # ids beyond it are none that it knows
    group: int  # the large model's cache group whose table it has
    left: int = 1  # of unread tokens before the last one, to the first pass


@triton.jit
def _begin(inputs, resident, passes, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    num_decodes = tl.load(inputs.counts + _NUM_DECODE_ROWS)
    real = row < num_decodes
    slot = tl.load(inputs.row_slot_R + row, mask=real, other=0).to(tl.int64)
    number = tl.load(inputs.row_number_R + row, mask=real, other=1)
    num_drafts = row * 0
    for ahead in tl.static_range(1, K + 1):
        inside = row + ahead < num_decodes
        there = tl.load(inputs.row_number_R + row + ahead, mask=inside, other=0)
        num_drafts += (there == ahead).to(tl.int32)
    wants = real & (number == 0) & (num_drafts > 0)
    first = tl.load(resident.drafts_NK + slot * (K + 1), mask=wants, other=0)
    wants = wants & (first < 0)  # what is there already has been given
    wanted = wants.to(tl.int32)
    place = tl.cumsum(wanted, axis=0) - wanted
    tl.store(passes.slot_D + place, slot.to(tl.int32), mask=wants)
    tl.store(passes.num_drafts_D + place, num_drafts, mask=wants)
    tl.store(passes.state, tl.sum(wanted, axis=0))
    tl.store(passes.state + 1, 0)
    tl.store(passes.state + 2, 0)


@triton.jit
def _plan_reading(
    inputs, resident, passes, T: tl.constexpr, R: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    real = lane < tl.load(passes.state)
    slot = tl.load(passes.slot_D + lane, mask=real, other=0)
    length = tl.load(resident.length + slot, mask=real, other=0)
    read = tl.load(passes.read_N + slot, mask=real, other=0)
    unread = tl.maximum(length - LEFT - read, 0)
    before = tl.cumsum(unread, axis=0) - unread
    taken = tl.minimum(unread, tl.maximum(T - before, 0))
    is_row = taken > 0
    ones = is_row.to(tl.int32)
    row = tl.cumsum(ones, axis=0) - ones
    num_rows, num_tokens = tl.sum(ones, axis=0), tl.sum(taken, axis=0)
    tl.store(inputs.row_slot_R + row, slot, mask=is_row)
    tl.store(inputs.q_start_R + row, read, mask=is_row)
    tl.store(inputs.q_len_R + row, taken, mask=is_row)
    tl.store(inputs.token_start_R + row, before, mask=is_row)
    tl.store(passes.read_N + slot, read + taken, mask=is_row)
    padding = (lane >= num_rows) & (lane < R)
    tl.store(inputs.row_slot_R + lane, 0, mask=padding)
    tl.store(inputs.q_start_R + lane, 0, mask=padding)
    tl.store(inputs.q_len_R + lane, 0, mask=padding)
    tl.store(inputs.token_start_R + lane, num_tokens, mask=padding)
    tl.store(inputs.counts, num_rows)
    tl.store(inputs.counts + 1, 0)
    tl.store(inputs.counts + 2, num_tokens)
    tl.store(inputs.counts + 3, 0)
    tl.store(passes.state + 2, 1)


@triton.jit
def _read_texts(
    inputs, table_NL, ids_ptr, T: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row, and one for what lies behind the last."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_tokens = tl.load(inputs.counts + 2)
    if row == R:
        for first in range(num_tokens, T, BLOCK):
            token = first + lanes
            tl.store(inputs.tokens_T + token, 0, mask=token < T)
            tl.store(inputs.positions_T + token, 0, mask=token < T)
            tl.store(inputs.kv_slots_GT + token, -1, mask=token < T)
    elif row < tl.load(inputs.counts):
        slot = tl.load(inputs.row_slot_R + row).to(tl.int64)
        start = tl.load(inputs.q_start_R + row)
        begin = tl.load(inputs.token_start_R + row)
        length = tl.load(inputs.q_len_R + row)
        for first in range(0, length, BLOCK):
            there = first + lanes < length
            position = start + first + lanes
            ids = tl.load(ids_ptr + slot * L + position, mask=there, other=0)
            page = tl.load(table_NL + slot * PAGES + position // PAGE_TOKENS, mask=there, other=0)
            kv_slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
            token = begin + first + lanes
            tl.store(inputs.tokens_T + token, tl.minimum(ids, V - 1), mask=there)
            tl.store(inputs.positions_T + token, position, mask=there)
            tl.store(inputs.kv_slots_GT + token, kv_slot, mask=there)


@triton.jit
def complete_pass(inputs, resident, slot, number, active, row, num_rows, R: tl.constexpr):
    """Fill up the rows of a pass, one token each, and say what is to be drawn behind it: a token
    for each of these slots, at its last row."""
    lane = tl.arange(0, slot.shape[0])
    ones = active.to(tl.int32)
    place = tl.cumsum(ones, axis=0) - ones
    num_samples = tl.sum(ones, axis=0)
    padding = (lane >= num_rows) & (lane < R)
    tl.store(inputs.tokens_T + lane, 0, mask=padding)
    tl.store(inputs.positions_T + lane, 0, mask=padding)
    tl.store(inputs.kv_slots_GT + lane, -1, mask=padding)
    tl.store(inputs.row_slot_R + lane, 0, mask=padding)
    tl.store(inputs.q_start_R + lane, 0, mask=padding)
    inside = lane < R
    tl.store(inputs.q_len_R + lane, (lane < num_rows).to(tl.int32), mask=inside)
    tl.store(inputs.token_start_R + lane, tl.minimum(lane, num_rows), mask=inside)
    index = tl.load(resident.output_index + slot, mask=active, other=0) + number
    tl.store(inputs.sample_token_S + place, row, mask=active)
    tl.store(inputs.sample_slot_S + place, slot.to(tl.int32), mask=active)
    tl.store(inputs.sample_index_S + place, index, mask=active)
    nobody = inside & (lane >= num_samples)
    tl.store(inputs.sample_token_S + lane, 0, mask=nobody)
    tl.store(inputs.sample_slot_S + lane, _NO_SLOT, mask=nobody)
    tl.store(inputs.sample_index_S + lane, 0, mask=nobody)
    tl.store(inputs.row_number_R + lane, number, mask=inside)  # the drafts before a guess
    tl.store(inputs.counts, num_rows)
    tl.store(inputs.counts + 1, num_rows)
    tl.store(inputs.counts + 2, num_rows)
    tl.store(inputs.counts + 3, num_samples)


@triton.jit
def _plan_pass(
    inputs, resident, passes, table_NL, ids_ptr, R: tl.constexpr, L: tl.constexpr,
    PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    number = tl.load(passes.state + 1)
    real = lane < tl.load(passes.state)
    slot = tl.load(passes.slot_D + lane, mask=real, other=0).to(tl.int64)
    length = tl.load(resident.length + slot, mask=real, other=0)
    wanted = tl.load(passes.num_drafts_D + lane, mask=real, other=0)
    if number == 0:
        is_read = tl.load(passes.read_N + slot, mask=real, other=0) >= length - 1
        wanted = tl.where(is_read, wanted, 0)
        tl.store(passes.num_drafts_D + lane, wanted, mask=real)
        tl.store(passes.read_N + slot, length + wanted, mask=wanted > 0)
    active = wanted > number
    ones = active.to(tl.int32)
    place = tl.cumsum(ones, axis=0) - ones
    num_samples = tl.sum(ones, axis=0)
    width = tl.where(number == 0, 2, 1)
    num_rows = num_samples * width
    row = place * width + width - 1
    last = tl.load(resident.last_token + slot, mask=active & (number == 0), other=0)
    draft_ptr = resident.drafts_NK + slot * (K + 1) + number - 1
    token = tl.load(draft_ptr, mask=active & (number > 0), other=0)
    token = tl.where(number == 0, last, token)
    for back in tl.static_range(2):
        # a text of one token has none before it
        position = tl.maximum(length + number - back, 0)
        there = active & (back < width)
        if back > 0:
            text = tl.load(ids_ptr + slot * L + position, mask=there & (length > 0), other=0)
            token = tl.where(length > 0, text, token)
        page = tl.load(table_NL + slot * PAGES + position // PAGE_TOKENS, mask=there, other=0)
        kv_slot = page.to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
        known = tl.minimum(tl.maximum(token, 0), V - 1)
        tl.store(inputs.tokens_T + row - back, known, mask=there)
        tl.store(inputs.positions_T + row - back, position, mask=there)
        tl.store(inputs.kv_slots_GT + row - back, kv_slot, mask=there)
        tl.store(inputs.row_slot_R + row - back, slot.to(tl.int32), mask=there)
        tl.store(inputs.q_start_R + row - back, position, mask=there)
    complete_pass(inputs, resident, slot, number, active, row, num_rows, R)


@triton.jit
def _keep_guesses(
    inputs, resident, passes, result_ptr, W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    sample = tl.arange(0, BLOCK)
    number = tl.load(passes.state + 1)
    real = sample < tl.load(inputs.counts + 3)
    slot = tl.load(inputs.sample_slot_S + sample, mask=real, other=0).to(tl.int64)
    token = tl.load(result_ptr + sample * W, mask=real, other=0)
    tl.store(resident.drafts_NK + slot * (K + 1) + number, token, mask=real)
    tl.debug_barrier()  # all threads have read the number that one of them changes
    tl.store(passes.state + 1, number + 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _take_chunks(
    step, inputs, passes, num_tokens, FIRST: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(step.counts)
    num_decodes = tl.load(step.counts + 1)
    num_chunks = num_rows - num_decodes
    num_real = tl.load(step.counts + 2) - num_decodes
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = lane < num_real
    there = lane < num_tokens
    token = tl.load(step.tokens_T + num_decodes + lane, mask=real, other=0)
    position = tl.load(step.positions_T + num_decodes + lane, mask=real, other=0)
    kv_slot = tl.load(step.kv_slots_GT + FIRST + num_decodes + lane, mask=real, other=-1)
    tl.store(inputs.tokens_T + lane, tl.minimum(token, V - 1), mask=there)
    tl.store(inputs.positions_T + lane, position, mask=there)
    tl.store(inputs.kv_slots_GT + lane, kv_slot, mask=there)
    chunk = lane < num_chunks
    inside = lane < R
    slot = tl.load(step.row_slot_R + num_decodes + lane, mask=chunk, other=0)
    start = tl.load(step.q_start_R + num_decodes + lane, mask=chunk, other=0)
    length = tl.load(step.q_len_R + num_decodes + lane, mask=chunk, other=0)
    begin = tl.load(step.token_start_R + num_decodes + lane, mask=chunk, other=0) - num_decodes
    tl.store(inputs.row_slot_R + lane, slot, mask=inside)
    tl.store(inputs.q_start_R + lane, start, mask=inside)
    tl.store(inputs.q_len_R + lane, length, mask=inside)
    tl.store(inputs.token_start_R + lane, tl.where(chunk, begin, num_real), mask=inside)
    tl.store(passes.read_N + slot, start + length, mask=chunk)
    if tl.program_id(0) == 0:
        tl.store(inputs.counts, num_chunks)
        tl.store(inputs.counts + 1, 0)
        tl.store(inputs.counts + 2, num_real)
        tl.store(inputs.counts + 3, 0)


def take_chunks(
    step: StepInputs, inputs: StepInputs, passes: DraftPasses, num_tokens: int, sizes: SmallSizes
) -> None:
    """Fill the drafter's inputs with the chunks of a step of up to so many tokens, which it reads
    now."""
    max_rows = len(inputs.row_slot_R)
    _take_chunks[(triton.cdiv(max(num_tokens, max_rows), _BLOCK),)](
        step,
        inputs,
        passes,
        num_tokens,
        FIRST=sizes.group * step.kv_slots_GT.shape[1],
        R=max_rows,
        V=sizes.vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def begin_drafts(step: StepInputs, resident: Resident, passes: DraftPasses) -> None:
    """Find the slots whose rows want drafts that nobody has given."""
    num_drafts = resident.drafts_NK.shape[1] - 1
    _begin[(1,)](
        step,
        resident,
        passes,
        K=num_drafts,
        BLOCK=triton.next_power_of_2(len(step.row_slot_R)),
        num_warps=4,
    )


def plan_reading(
    inputs: StepInputs,
    resident: Resident,
    passes: DraftPasses,
    ids_NL: Tensor,
    num_tokens: int,
    sizes: SmallSizes,
) -> None:
    """Fill the inputs with chunks of what has not been read of these slots up to what is left to
    the first pass, `num_tokens` at most, which are read now."""
    max_rows = len(inputs.row_slot_R)
    _, _, max_pages = resident.page_table.shape
    _plan_reading[(1,)](
        inputs,
        resident,
        passes,
        T=num_tokens,
        R=max_rows,
        LEFT=sizes.left,
        BLOCK=triton.next_power_of_2(max_rows),
        num_warps=4,
    )
    _read_texts[(max_rows + 1,)](
        inputs,
        resident.page_table[sizes.group],
        ids_NL,
        T=num_tokens,
        R=max_rows,
        L=ids_NL.shape[1],
        PAGES=max_pages,
        PAGE_TOKENS=sizes.page_tokens,
        V=sizes.vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def plan_pass(
    inputs: StepInputs,
    resident: Resident,
    passes: DraftPasses,
    ids_NL: Tensor,
    sizes: SmallSizes,
) -> None:
    """Fill the inputs with the rows of the next pass, and what is to be drawn behind them."""
    max_rows = len(inputs.row_slot_R)
    _, _, max_pages = resident.page_table.shape
    _plan_pass[(1,)](
        inputs,
        resident,
        passes,
        resident.page_table[sizes.group],
        ids_NL,
        R=max_rows,
        L=ids_NL.shape[1],
        PAGES=max_pages,
        PAGE_TOKENS=sizes.page_tokens,
        V=sizes.vocab_size,
        K=resident.drafts_NK.shape[1] - 1,
        BLOCK=triton.next_power_of_2(max_rows),
        num_warps=4,
    )


def keep_guesses(
    inputs: StepInputs, resident: Resident, passes: DraftPasses, result_SW: Tensor
) -> None:
    """Make what was drawn drafts of their slots; the next pass is another."""
    _keep_guesses[(1,)](
        inputs,
        resident,
        passes,
        result_SW,
        W=result_SW.shape[1],
        K=resident.drafts_NK.shape[1] - 1,
        BLOCK=triton.next_power_of_2(len(inputs.sample_slot_S)),
        num_warps=4,
    )
