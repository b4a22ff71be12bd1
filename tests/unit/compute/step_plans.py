"""Step plans: of a few decode rows, and random ones as a scheduler could make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.compute.step import DEVICE_TOKEN, NO_IDS, Int32Array, StepPlan, int32_array


def decode_plan(*rows: tuple[int, int, int], **changes: Any) -> StepPlan:
    """A step that decodes and samples these rows, each a slot, its epoch and an output index."""
    slots, epochs, indices = (int32_array(column) for column in zip(*rows, strict=True))
    numbers = np.arange(len(rows), dtype=np.int32)
    plan = StepPlan(
        step_id=1,
        num_decode_rows=len(rows),
        row_slot=slots,
        row_epoch=epochs,
        q_start=numbers,
        q_len=np.ones_like(numbers),
        pos_upper=numbers + 1,
        tokens=numbers,
        sample_row=numbers,
        sample_index=indices,
        page_slot=NO_IDS,
        page_index=NO_IDS,
        page_id=NO_IDS,
    )
    return replace(plan, **changes)


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """How large a plan to draw; every decode row and every second chunk is sampled."""

    num_decode_rows: int = 0
    chunks: tuple[int, ...] = ()  # tokens of each prefill row
    num_page_entries: int = 0
    num_slots: int = 32
    max_pages: int = 16
    page_tokens: int = 8
    vocab_size: int = 500
    num_groups: int = 1


def random_plan(sizes: PlanSizes, seed: int) -> StepPlan:
    """A plan of this size; half of its decode tokens are on the device only."""
    draw = np.random.default_rng(seed)

    def below(high: Int32Array | int, size: int | None = None) -> Int32Array:
        return np.asarray(draw.integers(0, high, size), dtype=np.int32)

    num_decodes, num_rows = sizes.num_decode_rows, sizes.num_decode_rows + len(sizes.chunks)
    q_len = np.array([1] * num_decodes + list(sizes.chunks), dtype=np.int32)
    max_len = sizes.max_pages * sizes.page_tokens
    q_start = below(max_len - q_len + 1) if num_rows else below(1, 0)
    tokens = below(sizes.vocab_size, int(q_len.sum()))
    tokens[:num_decodes][below(2, num_decodes) == 1] = DEVICE_TOKEN
    sampled = [*range(num_decodes), *range(num_decodes + 1, num_rows, 2)]
    places = draw.choice(sizes.num_slots * sizes.max_pages, sizes.num_page_entries, replace=False)
    return StepPlan(
        step_id=seed,
        num_decode_rows=num_decodes,
        row_slot=draw.permutation(sizes.num_slots)[:num_rows].astype(np.int32),
        row_epoch=below(5, num_rows),
        q_start=q_start,
        q_len=q_len,
        pos_upper=q_start + q_len,
        tokens=tokens,
        sample_row=np.array(sampled, dtype=np.int32),
        sample_index=below(100, len(sampled)),
        page_slot=(places // sizes.max_pages).astype(np.int32),
        page_index=(places % sizes.max_pages).astype(np.int32),
        page_id=below(10_000, sizes.num_page_entries),
        page_group=below(sizes.num_groups, sizes.num_page_entries * (sizes.num_groups > 1)),
    )


def random_slot_rows(num_slot_rows: int, num_words: int, num_slots: int, seed: int) -> Int32Array:
    """Slot rows [N, 1+W] of different slots; words of any bits."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(-(2**31), 2**31, (num_slot_rows, 1 + num_words), dtype=np.int32)
    rows[:, 0] = draw.permutation(num_slots)[:num_slot_rows]
    return rows
