"""Bias pairs and stop ids of every slot, at addresses that never change.

Shape legend: N slots, B bias pairs of a slot, E stop ids of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.step import MAX_BIAS, MAX_STOP_IDS

SEEN_IN_PROMPT = 1 << 30
"""Set in the count of an id that the prompt has; the bits below count how often it was said."""


@dataclass(frozen=True, slots=True)
class AdjustTables:
    """How many of a row count lies in the slot's words; the rest is whatever was there."""

    bias_id_NB: Tensor  # int32
    bias_NB: Tensor  # float32
    stop_id_NE: Tensor  # int32

    @staticmethod
    def make(num_slots: int, device: torch.device) -> AdjustTables:
        """Room for the longest lists that routers let in."""
        return AdjustTables(
            torch.zeros((num_slots, MAX_BIAS), dtype=torch.int32, device=device),
            torch.zeros((num_slots, MAX_BIAS), dtype=torch.float32, device=device),
            torch.zeros((num_slots, MAX_STOP_IDS), dtype=torch.int32, device=device),
        )
