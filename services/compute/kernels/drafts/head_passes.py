"""Passes of a head that drafts: the states that it sees, and which rows a pass has.

A head sees a token beside the state that the model made of the one before, or, behind a draft, the
one that it made itself. The model's are kept in pages, one of each position (`keep_states`). What
`draft_passes` does for a model it does for heads, but for the first pass: that has all tokens of a
slot that the head has not read with the model's states, which are those of the last step's rows
that were right. What a head writes for its drafts never counts as read.

Of several layers each has a pass with the same tokens, as many drafts more as its number, and the
states of the layer before it, which are kept in pages as the model's are.

Each token of a pass has a source: the place of a state in the pages; NO_STATE; or -2 - r, the
head's own state of row r of the pass before.

Shape legend: T tokens, R rows, N slots, L positions, D slots that are drafted for, K drafts of a
row, E hidden width, Y pages, P positions of a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.drafts.draft_passes import DraftPasses, SmallSizes, complete_pass
from services.compute.kernels.step.step_buffers import Resident, StepInputs

NO_STATE = -1

_NO_STATE = tl.constexpr(NO_STATE)
_BLOCK = 1024


class HeadRows(NamedTuple):
    """Where what a head sees beside its tokens is from."""

    source_T: Tensor  # int64
    row_D: Tensor  # int32, of each slot that is drafted for its last row in the pass before
    first_D: Tensor  # int32, the first position of each that is read with these drafts

    @staticmethod
    def make(max_tokens: int, max_rows: int, device: torch.device) -> HeadRows:
        source_T = torch.full((max_tokens,), NO_STATE, dtype=torch.int64, device=device)
        row_D = torch.zeros(max_rows, dtype=torch.int32, device=device)
        return HeadRows(source_T, row_D, row_D.clone())


@triton.jit(do_not_specialize=["num_tokens"])
def _state_sources(
    inputs, table_NL, source_T, num_tokens, R: tl.constexpr, PAGES: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row, and one for what lies behind the last."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if row == R:
        for first in range(tl.load(inputs.counts + 2), num_tokens, BLOCK):
            tl.store(source_T + first + lanes, _NO_STATE, mask=first + lanes < num_tokens)
    elif row < tl.load(inputs.counts):
        slot = tl.load(inputs.row_slot_R + row).to(tl.int64)
        start = tl.load(inputs.q_start_R + row)
        begin = tl.load(inputs.token_start_R + row)
        length = tl.load(inputs.q_len_R + row)
        for first in range(0, length, BLOCK):
            there = first + lanes < length
            before = start + first + lanes - 1
            known = there & (before >= 0)
            page = tl.load(table_NL + slot * PAGES + before // P, mask=known, other=0)
            place = tl.where(known, page.to(tl.int64) * P + before % P, _NO_STATE)
            tl.store(source_T + begin + first + lanes, place, mask=there)


@triton.jit
def _keep_states(
    x_TE, kv_slots_T, states, E: tl.constexpr, PAGE_STRIDE: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(kv_slots_T + token)
    if place >= 0:
        target = states + place // P * PAGE_STRIDE + place % P * E
        for first in range(0, E, BLOCK):
            e = first + tl.arange(0, BLOCK)
            tl.store(target + e, tl.load(x_TE + token * E + e, mask=e < E), mask=e < E)


@triton.jit
def _take_states(
    source_T, states, own_TE, x_TE, E: tl.constexpr, PAGE_STRIDE: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(source_T + token)
    is_kept = source >= 0
    is_own = source < _NO_STATE
    kept = tl.maximum(source, 0)
    kept_ptr = states + kept // P * PAGE_STRIDE + kept % P * E
    own_ptr = own_TE + tl.maximum(-2 - source, 0) * E
    for first in range(0, E, BLOCK):
        e = first + tl.arange(0, BLOCK)
        x = tl.load(kept_ptr + e, mask=is_kept & (e < E), other=0.0)
        own = tl.load(own_ptr + e, mask=is_own & (e < E), other=0.0)
        tl.store(x_TE + token * E + e, tl.where(is_own, own, x), mask=e < E)


@triton.jit
def _plan_head_pass(
    inputs, resident, passes, rows, table_NL, ids_ptr, R: tl.constexpr, L: tl.constexpr,
    PAGES: tl.constexpr, P: tl.constexpr, V: tl.constexpr, K: tl.constexpr, READS: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    number = tl.load(passes.state + 1)
    real = lane < tl.load(passes.state)
    slot = tl.load(passes.slot_D + lane, mask=real, other=0).to(tl.int64)
    length = tl.load(resident.length + slot, mask=real, other=0)
    wanted = tl.load(passes.num_drafts_D + lane, mask=real, other=0)
    row_before = tl.load(rows.row_D + lane, mask=real, other=0).to(tl.int64)
    reads = READS and number < LAYERS
    first = tl.load(rows.first_D + lane, mask=real, other=0)
    if number == 0:
        read = tl.load(passes.read_N + slot, mask=real, other=0)
        behind_reading = tl.load(passes.state + 2) > 0
        if READS:
            wanted = tl.where((read < 0) | (behind_reading & (read < length)), 0, wanted)
            tl.store(passes.num_drafts_D + lane, wanted, mask=real)
            tl.store(passes.read_N + slot, length + 1, mask=wanted > 0)
            first = tl.minimum(read, length)
            tl.store(rows.first_D + lane, first, mask=real)
    active = wanted > number
    ahead = tl.where(active, number, 0)
    # Who has drafts enough only reads: each layer has the same tokens.
    width = tl.where(reads, (length + ahead + 1 - first) * (wanted > 0), active.to(tl.int32))
    row = tl.cumsum(width, axis=0) - 1
    num_rows = tl.sum(width, axis=0)
    last = tl.load(resident.last_token + slot, mask=real, other=0)
    for back in range(tl.max(width, axis=0)):
        there = back < width
        position = length + ahead - back
        number_of_draft = ahead - back  # from 1 on; behind the last token that is known
        draft_ptr = resident.drafts_NK + slot * (K + 1) + number_of_draft - 1
        draft = tl.load(draft_ptr, mask=there & (number_of_draft > 0), other=0)
        text = tl.load(ids_ptr + slot * L + position, mask=there & (number_of_draft < 0), other=0)
        token = tl.where(number_of_draft > 0, draft, tl.where(number_of_draft < 0, text, last))
        page = tl.load(table_NL + slot * PAGES + position // P, mask=there, other=0)
        known = tl.minimum(tl.maximum(token, 0), V - 1)
        tl.store(inputs.tokens_T + row - back, known, mask=there)
        tl.store(inputs.positions_T + row - back, position, mask=there)
        kv_slot = page.to(tl.int64) * P + position % P
        tl.store(inputs.kv_slots_GT + row - back, kv_slot, mask=there)
        tl.store(inputs.row_slot_R + row - back, slot.to(tl.int32), mask=there)
        tl.store(inputs.q_start_R + row - back, position, mask=there)
        before = tl.maximum((position if READS else length) - 1, 0)
        page = tl.load(table_NL + slot * PAGES + before // P, mask=there, other=0)
        source = page.to(tl.int64) * P + before % P
        if READS:
            source = tl.where(reads, source, -2 - row_before)
        tl.store(rows.source_T + row - back, source, mask=there)
    tl.store(rows.row_D + lane, row, mask=active)
    padding = (lane >= num_rows) & (lane < R)
    tl.store(rows.source_T + lane, _NO_STATE, mask=padding)
    complete_pass(inputs, resident, slot, number, active, row, num_rows, R)


def find_states(
    inputs: StepInputs, table_NL: Tensor, rows: HeadRows, num_tokens: int, page_tokens: int
) -> None:
    """Give chunks in the inputs, up to so many tokens, the model's states as sources."""
    max_rows = len(inputs.row_slot_R)
    _state_sources[(max_rows + 1,)](
        inputs,
        table_NL,
        rows.source_T,
        num_tokens,
        R=max_rows,
        PAGES=table_NL.shape[1],
        P=page_tokens,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def keep_states(x_TE: Tensor, kv_slots_T: Tensor, states_YPE: Tensor) -> None:
    """Lay states where the keys and values of the same tokens lie in their pages."""
    num_tokens, width = x_TE.shape
    _keep_states[(num_tokens,)](
        x_TE,
        kv_slots_T,
        states_YPE,
        E=width,
        PAGE_STRIDE=states_YPE.stride(0),
        P=states_YPE.shape[1],
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=4,
    )


def take_states(rows: HeadRows, states_YPE: Tensor, own_TE: Tensor, x_TE: Tensor) -> None:
    """Fill x with what its tokens' sources say."""
    num_tokens, width = x_TE.shape
    _take_states[(num_tokens,)](
        rows.source_T,
        states_YPE,
        own_TE,
        x_TE,
        E=width,
        PAGE_STRIDE=states_YPE.stride(0),
        P=states_YPE.shape[1],
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=4,
    )


def plan_head_pass(
    inputs: StepInputs,
    resident: Resident,
    passes: DraftPasses,
    rows: HeadRows,
    ids_NL: Tensor,
    sizes: SmallSizes,
    *,
    reads: bool = True,
    num_layers: int = 1,
) -> None:
    """Fill the inputs with the rows of the next pass, and what is to be drawn behind them.

    `reads`: else the heads keep nothing of a text, and each pass has the model's last state.
    """
    max_rows = len(inputs.row_slot_R)
    _, _, max_pages = resident.page_table.shape
    _plan_head_pass[(1,)](
        inputs,
        resident,
        passes,
        rows,
        resident.page_table[sizes.group],
        ids_NL,
        R=max_rows,
        L=ids_NL.shape[1],
        PAGES=max_pages,
        P=sizes.page_tokens,
        V=sizes.vocab_size,
        K=resident.drafts_NK.shape[1] - 1,
        READS=reads,
        LAYERS=num_layers,
        BLOCK=triton.next_power_of_2(max_rows),
        num_warps=4,
    )
