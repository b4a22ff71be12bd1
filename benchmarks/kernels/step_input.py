"""Step input: some ten kilobytes moved, so the time is a launch and three dependent loads.

Predicted on an H200, in a graph: 2 µs for each of the two kernels at one row and at 256; 2.5 µs
to unpack a mixed step, whose prompt tokens search for their row (two more loads that miss). With
seven cache groups (Gemma 3) other programs look up the other groups' pages: the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.step.slot_words import NUM_WORDS
from services.compute.kernels.step.step_buffers import Resident, StepInputs
from services.compute.kernels.step.step_deltas import apply_deltas
from services.compute.kernels.step.step_input import unpack_step
from services.compute.runner.uploads import StepPacker
from services.compute.step import DEVICE_TOKEN, Int32Array, StepPlan

NUM_SLOTS = 256
MAX_PAGES = 2048
PAGE_TOKENS = 16
STEPS = (
    ("1 row", 1, (), 0),
    ("256 rows", 256, (), 0),
    ("100 rows and 4 chunks of 512", 100, (512,) * 4, 4),
)
GROUPS = (1, 7)
NUM_SETS = 4
TOKEN_BYTES = 4 + 4 + 4 + 8 + 8  # packed id, page, and three outputs
ROW_BYTES = 6 * 4 + 5 * 4 + 3 * 4  # packed row and sample, their outputs, last token and slot
WRITE_BYTES = 8  # of one resident word: read and written


def cases() -> Iterator[Case]:
    """Both launches for each kind of step."""
    for num_groups in GROUPS:
        yield from _cases(num_groups)


def _cases(num_groups: int) -> Iterator[Case]:
    device = torch.device("cuda")
    resident = Resident.make(NUM_SLOTS, MAX_PAGES, NUM_WORDS, device, num_groups)
    resident.page_table.random_(0, 60_000)
    for name, num_decodes, chunks, num_newcomers in STEPS:
        plans = [make_plan(num_decodes, chunks, seed) for seed in range(NUM_SETS)]
        num_rows, num_tokens = plans[0].num_rows, plans[0].num_tokens
        uploads = [upload(plan, num_newcomers, device) for plan in plans]
        num_deltas = len(plans[0].page_slot) + num_newcomers * NUM_WORDS
        applies: list[Callable[[], None]] = [partial(apply_deltas, u, resident) for u in uploads]
        unpacks: list[Callable[[], None]] = [
            partial(
                unpack_step,
                packed,
                resident,
                StepInputs.make(num_tokens, NUM_SLOTS, device, num_groups),
                num_tokens,
                PAGE_TOKENS,
            )
            for packed in uploads
        ]
        name += f", {num_groups} groups" * (num_groups > 1)
        yield Case(f"step input: deltas, {name}", applies, num_deltas * WRITE_BYTES)
        num_bytes = num_tokens * TOKEN_BYTES + num_rows * ROW_BYTES
        yield Case(f"step input: unpack, {name}", unpacks, num_bytes)


def make_plan(num_decodes: int, chunks: tuple[int, ...], seed: int) -> StepPlan:
    """Rows at random lengths; a sixteenth of the decode rows take a page, each chunk its own."""
    draw = np.random.default_rng(seed)
    q_len = np.array([1] * num_decodes + list(chunks), dtype=np.int32)
    num_rows = len(q_len)
    slots = draw.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)
    tokens = np.full(int(q_len.sum()), DEVICE_TOKEN, dtype=np.int32)
    tokens[num_decodes:] = draw.integers(0, 100_000, len(tokens) - num_decodes)
    num_pages = np.where(q_len == 1, draw.random(num_rows) < 1 / PAGE_TOKENS, q_len // PAGE_TOKENS)
    page_slot = np.repeat(slots, num_pages)
    return StepPlan(
        step_id=seed,
        num_decode_rows=num_decodes,
        row_slot=slots,
        row_epoch=np.zeros(num_rows, dtype=np.int32),
        q_start=draw.integers(0, 8192, num_rows, dtype=np.int32),
        q_len=q_len,
        pos_upper=q_len,
        tokens=tokens,
        sample_row=np.arange(num_rows, dtype=np.int32),
        sample_index=np.arange(num_rows, dtype=np.int32),
        page_slot=page_slot,
        page_index=np.arange(len(page_slot), dtype=np.int32),
        page_id=draw.integers(0, 60_000, len(page_slot), dtype=np.int32),
    )


def upload(plan: StepPlan, num_newcomers: int, device: torch.device) -> torch.Tensor:
    """The packed step on the device."""
    slot_rows: Int32Array = np.zeros((num_newcomers, 1 + NUM_WORDS), dtype=np.int32)
    slot_rows[:, 0] = np.arange(num_newcomers)
    out = np.zeros(65_536, dtype=np.int32)
    StepPacker(NUM_SLOTS).pack(plan, slot_rows, out)
    return torch.from_numpy(out).to(device)
