"""Decode attention in plain torch, row by row.

Shape legend: T tokens, H query heads, D head width, K kv heads, P positions of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.decode_attention.work import DecodeWork
from services.compute.kernels.step_input.buffers import NUM_DECODE_ROWS, Resident, StepInputs


def decode_attention(
    q_THD: Tensor,
    kv_pages: Tensor,
    resident: Resident,
    inputs: StepInputs,
    work: DecodeWork,
    out_THD: Tensor,
    scale: float,
    window: int,
    num_rows: int,
) -> None:
    """Write out_THD for the step's decode rows; pages [N, 2, K, P, D]. `work` goes unused."""
    kv_heads, page_tokens = kv_pages.shape[2], kv_pages.shape[3]
    for row in range(min(int(inputs.counts[NUM_DECODE_ROWS]), num_rows)):
        length = int(inputs.q_start_R[row]) + 1
        first = max(0, length - window) if window else 0
        positions = torch.arange(first, length, device=q_THD.device)
        slot = int(inputs.row_slot_R[row])
        pages = resident.page_table[slot, positions // page_tokens].long()
        seen = kv_pages[pages, :, :, positions % page_tokens]  # [positions, 2, K, D]
        keys, values = seen.unbind(1)
        q_KGD = q_THD[row].reshape(kv_heads, -1, q_THD.shape[2])
        weights = torch.softmax(torch.einsum("kgd,nkd->kgn", q_KGD, keys) * scale, dim=-1)
        out_THD[row] = torch.einsum("kgn,nkd->kgd", weights, values).flatten(0, 1)
