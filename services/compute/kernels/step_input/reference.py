"""Step input in plain PyTorch: what the kernels must do, a line for each thing.

Shape legend: R rows, T tokens, S samples.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.compute.kernels.step_input.buffers import NO_SLOT, Resident, StepInputs
from services.compute.kernels.step_input.layout import (
    HEADER_INTS,
    NUM_SLOT_ROWS,
    NUM_TOKENS,
    Sections,
)
from services.compute.step import DEVICE_TOKEN


def apply_deltas(packed: Tensor, resident: Resident) -> None:
    """Write the upload's page-table entries and slot rows into the resident tables."""
    num_words = resident.slot_params.shape[1]
    counts = packed[:HEADER_INTS].tolist()
    at = Sections.of(counts, num_words)
    packed = packed.long()
    page_slot = packed[at.page_slot : at.page_index]
    page_index = packed[at.page_index : at.page_id]
    resident.page_table[page_slot, page_index] = packed[at.page_id : at.slot_rows].int()
    slot_rows = packed[at.slot_rows : at.end].view(counts[NUM_SLOT_ROWS], 1 + num_words)
    resident.slot_params[slot_rows[:, 0]] = slot_rows[:, 1:].int()


def unpack_step(
    packed: Tensor,
    resident: Resident,
    inputs: StepInputs,
    num_tokens: int,
    num_samples: int,
    page_tokens: int,
) -> None:
    """Fill `inputs` from the upload, padded to `num_tokens` and `num_samples`.

    Rows are padded up to the lesser of `num_tokens` and the buffers' rows, with empty ones.
    """
    counts = packed[:HEADER_INTS].tolist()
    at = Sections.of(counts, resident.slot_params.shape[1])
    packed = packed.long()
    row_slot_R = packed[at.row_slot : at.q_start]
    q_start_R = packed[at.q_start : at.token_start]
    token_start_R = packed[at.token_start : at.tokens - 1]
    q_len_R = packed[at.token_start : at.tokens].diff()
    tokens_T = packed[at.tokens : at.sample_row]
    sample_row_S = packed[at.sample_row : at.sample_index]
    sample_index_S = packed[at.sample_index : at.page_slot]

    row_T = torch.arange(len(row_slot_R), device=packed.device).repeat_interleave(q_len_R)
    slot_T = row_slot_R[row_T]
    positions_T = (
        q_start_R[row_T] + torch.arange(len(tokens_T), device=packed.device) - token_start_R[row_T]
    )
    from_device_T = tokens_T == DEVICE_TOKEN
    page_T = resident.page_table[slot_T, positions_T // page_tokens].long()
    kv_slots_T = page_T * page_tokens + positions_T % page_tokens

    inputs.counts[:] = pad(packed[:4], (0, len(inputs.counts) - 4))
    tokens_T = torch.where(from_device_T, resident.last_token[slot_T], tokens_T)
    _fill(inputs.tokens_T[:num_tokens], tokens_T)
    _fill(inputs.positions_T[:num_tokens], positions_T)
    _fill(inputs.kv_slots_T[:num_tokens], kv_slots_T, padding=-1)
    rows = slice(min(num_tokens, len(inputs.row_slot_R)))
    _fill(inputs.row_slot_R[rows], row_slot_R)
    _fill(inputs.q_start_R[rows], q_start_R)
    _fill(inputs.q_len_R[rows], q_len_R)
    _fill(inputs.token_start_R[rows], token_start_R, padding=counts[NUM_TOKENS])
    last_S = token_start_R[sample_row_S] + q_len_R[sample_row_S] - 1
    _fill(inputs.sample_token_S[:num_samples], last_S)
    _fill(inputs.sample_slot_S[:num_samples], row_slot_R[sample_row_S], padding=NO_SLOT)
    _fill(inputs.sample_index_S[:num_samples], sample_index_S)


def _fill(out: Tensor, values: Tensor, padding: int = 0) -> None:
    out[: len(values)] = values
    out[len(values) :] = padding
