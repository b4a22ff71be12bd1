"""The list of tiles that a step's chunk rows are cut into, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ITEM_ROWS = 128
"""Rows of an item, queries times heads of a group: the largest `block_m`."""
HOST_SMS = 2
"""What the interpreter is told of its processors; few, so that programs take several tiles."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Items in order of falling context. Filled by `plan_prefill`, read by `prefill_attention`.

    Shape legend: I items, R rows.
    """

    items_I2: Tensor  # int32 (row, first query of the block within the row)
    num_items: Tensor  # int32 [1]
    block_q: int  # queries of an item
    group: int  # query heads per head of keys
    max_rows: int
    num_sms: int

    @staticmethod
    def make(max_tokens: int, max_rows: int, group: int, device: torch.device) -> PrefillWork:
        """Room for the largest step; `group` is the number of query heads per head of keys.

        Raises ValueError for groups of more than 64, of which a tile would not hold one query.
        """
        if not 1 <= group <= ITEM_ROWS // 2:
            raise ValueError(f"query heads per head of keys must be 1 to 64, not {group}")
        block_q = 2 * (ITEM_ROWS // 2 // group)  # even, so that tiles of half the rows fill up too
        max_items = num_items_bound(max_tokens, max_rows, block_q)
        num_sms = HOST_SMS
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return PrefillWork(
            items_I2=torch.zeros(max_items, 2, dtype=torch.int32, device=device),
            num_items=torch.zeros(1, dtype=torch.int32, device=device),
            block_q=block_q,
            group=group,
            max_rows=max_rows,
            num_sms=num_sms,
        )


def num_items_bound(num_tokens: int, max_rows: int, block_q: int) -> int:
    """The most items that rows of this many tokens together can have."""
    return num_tokens // block_q + min(max_rows, num_tokens)
