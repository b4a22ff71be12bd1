"""What a step changes on the device before its rows are read: states, page tables, slot settings,
and drafts that the host gives.

One launch, whose sizes are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.step.step_buffers import (
    GROUP_SHIFT,
    HEADER_INTS,
    NUM_GIVEN_DRAFTS,
    NUM_KEPT_ROWS,
    NUM_SLOT_ROWS,
    NUM_STATES,
    Resident,
    Sections,
)

_BLOCK = 128
_DELTA_PROGRAMS = 16  # 2,048 page-table entries at once; a step rarely has more than a few
_HEADER = tl.constexpr(HEADER_INTS)
_NUM_KEPT_ROWS = tl.constexpr(NUM_KEPT_ROWS)
_NUM_STATES = tl.constexpr(NUM_STATES)
_NUM_GIVEN_DRAFTS = tl.constexpr(NUM_GIVEN_DRAFTS)
_GROUP_SHIFT = tl.constexpr(GROUP_SHIFT)
_SLOT_MASK = tl.constexpr((1 << GROUP_SHIFT) - 1)


@triton.jit
def chunks_of(packed, num_rows):
    """Where the sections of chunks begin, behind the slots of rows."""
    return packed + _HEADER + num_rows - tl.load(packed + _NUM_KEPT_ROWS)


@triton.jit
def states_of(packed, num_rows, num_tokens, num_samples):
    """Where the sections behind those of rows, tokens and samples begin."""
    num_decode_rows = tl.load(packed + 1)
    num_chunks = num_rows - num_decode_rows
    rest = 2 * num_chunks + num_tokens - num_decode_rows + 2 * (num_samples - num_decode_rows)
    return chunks_of(packed, num_rows) + rest


@triton.jit
def set_slots(resident, slot, length, index, token, mask):
    tl.store(resident.length + slot, length, mask=mask)
    tl.store(resident.output_index + slot, index, mask=mask)
    tl.store(resident.last_token + slot, token, mask=mask)


@triton.jit
def _apply_deltas(
    packed,
    resident,
    NUM_GROUPS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    num_rows = tl.load(packed)
    num_tokens = tl.load(packed + 2)
    num_samples = tl.load(packed + 3)
    num_entries = tl.load(packed + 4)
    num_slot_rows = tl.load(packed + 5)
    states = states_of(packed, num_rows, num_tokens, num_samples)
    num_states = tl.load(packed + _NUM_STATES)
    page_slot = states + 4 * num_states
    lanes = tl.arange(0, BLOCK)
    for first in range(program * BLOCK, num_states, NUM_PROGRAMS * BLOCK):
        state = first + lanes
        mask = state < num_states
        column = states + state
        slot = tl.load(column, mask=mask, other=0)
        length = tl.load(column + num_states, mask=mask, other=0)
        index = tl.load(column + 2 * num_states, mask=mask, other=0)
        token = tl.load(column + 3 * num_states, mask=mask, other=0)
        set_slots(resident, slot, length, index, token, mask)
    for first in range(program * BLOCK, num_entries, NUM_PROGRAMS * BLOCK):
        entry = first + lanes
        mask = entry < num_entries
        slot = tl.load(page_slot + entry, mask=mask, other=0).to(tl.int64)
        if NUM_GROUPS > 1:
            slot = (slot >> _GROUP_SHIFT) * NUM_SLOTS + (slot & _SLOT_MASK)
        index = tl.load(page_slot + num_entries + entry, mask=mask, other=0)
        page = tl.load(page_slot + 2 * num_entries + entry, mask=mask, other=0)
        tl.store(resident.page_table + slot * MAX_PAGES + index, page, mask=mask)
    slot_rows = page_slot + 3 * num_entries
    words = tl.arange(0, PADDED_WORDS)
    for row in range(program, num_slot_rows, NUM_PROGRAMS):
        slot_row = slot_rows + row * (1 + NUM_WORDS)
        place = tl.load(slot_row).to(tl.int64)
        values = tl.load(slot_row + 1 + words, mask=words < NUM_WORDS, other=0)
        tl.store(resident.slot_params + place * NUM_WORDS + words, values, mask=words < NUM_WORDS)
    if MAX_DRAFTS > 0:
        num_drafts = tl.load(packed + _NUM_GIVEN_DRAFTS)
        drafts = slot_rows + num_slot_rows * (1 + NUM_WORDS)
        for first in range(program * BLOCK, num_drafts, NUM_PROGRAMS * BLOCK):
            draft = first + lanes
            mask = draft < num_drafts
            row_slot = tl.load(drafts + draft, mask=mask, other=0)
            token = tl.load(drafts + num_drafts + draft, mask=mask, other=0)
            place = (row_slot & _SLOT_MASK) * (MAX_DRAFTS + 1) + (row_slot >> _GROUP_SHIFT) - 1
            tl.store(resident.drafts_NK + place, token, mask=mask)


def apply_deltas(packed: Tensor, resident: Resident) -> None:
    """Write the upload's states, page-table entries, slot rows and drafts into resident tables.

    No two entries of one upload may be for the same place: they are written in no order.
    """
    num_words = resident.slot_params.shape[1]
    num_groups, num_slots, max_pages = resident.page_table.shape
    _apply_deltas[(_DELTA_PROGRAMS,)](
        packed,
        resident,
        NUM_GROUPS=num_groups,
        NUM_SLOTS=num_slots,
        MAX_PAGES=max_pages,
        NUM_WORDS=num_words,
        PADDED_WORDS=triton.next_power_of_2(num_words),
        MAX_DRAFTS=resident.drafts_NK.shape[1] - 1,
        NUM_PROGRAMS=_DELTA_PROGRAMS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def apply_deltas_reference(packed: Tensor, resident: Resident) -> None:
    num_words = resident.slot_params.shape[1]
    header = packed[:HEADER_INTS].tolist()
    at = Sections.of(header, num_words)
    states_4E = packed[at.states : at.page_slot].view(4, header[NUM_STATES])
    for table, values_E in zip(resident[1:4], states_4E[1:], strict=True):
        table[states_4E[0].long()] = values_E
    packed = packed.long()
    page_slot = packed[at.page_slot : at.page_index]
    page_index = packed[at.page_index : at.page_id]
    page_group, page_slot = page_slot >> GROUP_SHIFT, page_slot & ((1 << GROUP_SHIFT) - 1)
    resident.page_table[page_group, page_slot, page_index] = packed[at.page_id : at.slot_rows].int()
    slot_rows = packed[at.slot_rows : at.drafts].view(header[NUM_SLOT_ROWS], 1 + num_words)
    resident.slot_params[slot_rows[:, 0]] = slot_rows[:, 1:].int()
    row_slot_F, draft_F = packed[at.drafts : at.end].view(2, header[NUM_GIVEN_DRAFTS])
    places = row_slot_F & ((1 << GROUP_SHIFT) - 1), (row_slot_F >> GROUP_SHIFT) - 1
    resident.drafts_NK[places] = draft_F.int()
