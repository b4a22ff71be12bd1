"""What the kernels compute, in plain PyTorch, with reads of device values by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.prefill_attention.work import PrefillWork
from services.compute.kernels.step_input.buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    Resident,
    StepInputs,
)


def plan_prefill(
    inputs: StepInputs, work: PrefillWork, num_tokens: int, all_rows: bool = False
) -> None:
    """Write the blocks of queries of all chunk rows, those of the longest context first."""
    first_row = 0 if all_rows else int(inputs.counts[NUM_DECODE_ROWS])
    starts = inputs.q_start_R.tolist()
    lengths = inputs.q_len_R.tolist()
    items = [
        (row, first)
        for row in range(first_row, int(inputs.counts[NUM_ROWS]))
        for first in range(0, lengths[row], work.block_q)
    ]
    items.sort(key=lambda item: -(starts[item[0]] + item[1]))
    if items:
        work.items_I2[: len(items)] = torch.tensor(items, dtype=torch.int32)
    work.num_items.fill_(len(items))


def prefill_attention(
    q_THD: Tensor,
    kv_pages: Tensor,
    resident: Resident,
    inputs: StepInputs,
    work: PrefillWork,
    out_THD: Tensor,
    scale: float,
    window: int,
    num_tokens: int,
) -> None:
    """Attention of every planned query over positions up to its own, the last `window` if not 0."""
    page_tokens = kv_pages.shape[3]
    for row, first in work.items_I2[: int(work.num_items)].tolist():
        q_len = min(work.block_q, int(inputs.q_len_R[row]) - first)
        position = int(inputs.q_start_R[row]) + first
        token = int(inputs.token_start_R[row]) + first
        end = position + q_len
        begin = max(position - window + 1, 0) if window else 0  # what is older may be gone
        num_pages = -(-end // page_tokens)
        pages = resident.page_table[int(inputs.row_slot_R[row]), :num_pages].long()
        kv_2KND = kv_pages[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, begin:end]
        keys_HND, values_HND = kv_2KND.repeat_interleave(work.group, dim=1)
        query_Q1 = torch.arange(position, end, device=q_THD.device)[:, None]
        key_1N = torch.arange(begin, end, device=q_THD.device)[None, :]
        hidden_QN = key_1N > query_Q1
        if window:
            hidden_QN |= key_1N <= query_Q1 - window
        scores_HQN = q_THD[token : token + q_len].transpose(0, 1) @ keys_HND.transpose(1, 2) * scale
        weights_HQN = scores_HQN.masked_fill(hidden_QN, -torch.inf).softmax(dim=-1)
        out_THD[token : token + q_len] = (weights_HQN @ values_HND).transpose(0, 1)
