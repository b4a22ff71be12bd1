"""Packing: from a step's plan to the int32 that go to the device in one copy.

The layout is `services.compute.kernels.step_input.layout`'s.

Shape legend: R rows, T tokens, S samples, D page-table entries, N slot rows, W words of a slot.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.compute.kernels.step_buffers import GROUP_SHIFT, HEADER_INTS, Sections
from services.compute.step import Int32Array, StepPlan

MAX_PAGE_ENTRIES = 16_384
"""Room for page-table entries in an upload. A step's own tokens need one for each 16 or so; more
than this come only where cached prefixes of 262,144 tokens and more are taken up at once."""

_ZERO = np.zeros(1, dtype=np.int32)
_NONE = np.zeros(0, dtype=np.int32)


def packed_size(
    max_rows: int, max_tokens: int, max_page_entries: int, max_slot_rows: int, num_words: int
) -> int:
    """Int32 of the largest upload within these limits; every row may be sampled."""
    counts = [max_rows, max_rows, max_tokens, max_rows, max_page_entries, max_slot_rows]
    return Sections.of(counts, num_words).end


def pack(plan: StepPlan, slot_rows: Int32Array, out: Int32Array) -> int:
    """Write the plan and its slot rows [N, 1+W] (slot, words) to `out`; return how many int32.

    Raises ValueError if `out` is too small.
    """
    row_slot, tokens = plan.row_slot, plan.tokens
    sample_row, page_slot = plan.sample_row, plan.page_slot
    num_rows, num_tokens, num_samples = len(row_slot), len(tokens), len(sample_row)
    num_entries, num_slot_rows = len(page_slot), len(slot_rows)
    if len(plan.page_group):
        page_slot = page_slot | plan.page_group << GROUP_SHIFT
    counts = (num_rows, plan.num_decode_rows, num_tokens, num_samples, num_entries, num_slot_rows)
    header = np.array((*counts, 0, 0), dtype=np.int32)
    rows_end = HEADER_INTS + 3 * num_rows + 1
    size = rows_end + num_tokens + 2 * num_samples + 3 * num_entries + slot_rows.size
    if size > len(out):
        raise ValueError(f"step {plan.step_id}: {size} int32 do not fit into {len(out)}")
    np.concatenate(
        (
            header,
            row_slot,
            plan.q_start,
            _ZERO,
            np.add.accumulate(plan.q_len, dtype=np.int32),
            tokens,
            sample_row,
            plan.sample_index,
            page_slot,
            plan.page_index,
            plan.page_id,
            slot_rows.ravel(),
        ),
        out=out[:size],
    )
    return size


def split(plan: StepPlan, max_page_entries: int) -> tuple[StepPlan, ...]:
    """The plan alone; or, if its page-table entries do not fit into one upload, parts of it.

    All but the last have no rows: their entries are applied first, each part by an upload and a
    launch of its own. The last is the step itself with the entries that are left.
    """
    num_entries = len(plan.page_slot)
    if num_entries <= max_page_entries:
        return (plan,)
    starts = range(0, num_entries, max_page_entries)
    parts = [_with_entries(plan, slice(start, start + max_page_entries)) for start in starts]
    return (*map(without_rows, parts[:-1]), parts[-1])


def without_rows(plan: StepPlan) -> StepPlan:
    """Only what the plan changes on the device; for a step that cannot run, too: its entries and
    slots are never sent again, and may belong to sequences of later steps."""
    return replace(
        plan,
        num_decode_rows=0,
        row_slot=_NONE,
        row_epoch=_NONE,
        q_start=_NONE,
        q_len=_NONE,
        pos_upper=_NONE,
        tokens=_NONE,
        sample_row=_NONE,
        sample_index=_NONE,
    )


def _with_entries(plan: StepPlan, entries: slice) -> StepPlan:
    return replace(
        plan,
        page_slot=plan.page_slot[entries],
        page_index=plan.page_index[entries],
        page_id=plan.page_id[entries],
        page_group=plan.page_group[entries],
    )
