"""Newcomers in plain PyTorch, one after the other.

Shape legend: N slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.adjust.tables import SEEN_IN_PROMPT, AdjustTables
from services.compute.kernels.enter_slots.layout import ENTRY_INTS, HEADER_INTS


def enter_slots(packed: Tensor, said_NV: Tensor, tables: AdjustTables) -> None:
    """As the kernel's."""
    vocab_size = said_NV.shape[1]
    for number in range(int(packed[0])):
        first = HEADER_INTS + number * ENTRY_INTS
        slot, counted, *counts, start, _ = packed[first : first + ENTRY_INTS].tolist()
        num_prompt, num_output, num_bias, num_stops = counts
        sizes = [num_prompt, num_output, num_bias, num_bias, num_stops]
        ids = torch.split(packed[start : start + sum(sizes)], sizes)
        prompt, output = (x[(x >= 0) & (x < vocab_size)].long() for x in ids[:2])
        if counted:
            said = torch.bincount(output, minlength=vocab_size)
            said[prompt] += SEEN_IN_PROMPT
            said_NV[slot] = said.int()
        tables.bias_id_NB[slot, :num_bias] = ids[2]
        tables.bias_NB[slot, :num_bias] = ids[3].view(torch.float32)
        tables.stop_id_NE[slot, :num_stops] = ids[4]
