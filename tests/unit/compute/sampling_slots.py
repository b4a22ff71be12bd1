"""Sequences that take slots of the CPU's sampler, by way of an upload."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.compute.kernels.sampling.slot_entries import pack_entries, packed_size
from services.compute.sampling.sampler import Sampler
from services.compute.sampling.slots import slots_of
from services.compute.step import SlotDelta


def take_slots(sampler: Sampler, deltas: Sequence[SlotDelta], vocab_size: int) -> None:
    """Give sequences their slots; nothing of earlier sequences stays."""
    slot_rows, entries = slots_of(deltas, vocab_size)
    packed = np.full(packed_size(0), 10**9, dtype=np.int32)
    sampler.enter(packed[: pack_entries(entries, packed)])
    sampler.take(slot_rows)
