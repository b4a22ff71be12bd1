"""The schools of batching by the names that the settings know."""

from __future__ import annotations

from typing import Literal

from services.compute.scheduler.decode_first import DecodeFirst
from services.compute.scheduler.policy import BatchPolicy
from services.compute.scheduler.prefill_first import PrefillFirst
from services.compute.scheduler.static_batch import StaticBatch

School = Literal["decode_first", "prefill_first", "static_batch"]


def make_policy(school: School, static_batch_window_s: float) -> BatchPolicy:
    """Make the policy of this name."""
    policies: dict[School, BatchPolicy] = {
        "decode_first": DecodeFirst(),
        "prefill_first": PrefillFirst(),
        "static_batch": StaticBatch(static_batch_window_s),
    }
    return policies[school]
