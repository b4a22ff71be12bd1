"""Settings of the scheduler."""

from __future__ import annotations

from pydantic import Field

from common.config import Settings
from services.compute.step import MAX_SCORED_TOKENS


class SchedulerSettings(Settings):
    """Limits of one scheduler, resolved from the service's settings and the runner's spec."""

    max_num_seqs: int = Field(default=256, ge=1)  # sequences running at once
    max_waiting: int = Field(default=1024, ge=1)  # sequences queued before refusing
    max_prefill_tokens: int = Field(default=8192, ge=1)  # prompt tokens per step
    prefix_cache: bool = True  # share pages between requests; forks of one request always do
    # prompt tokens per step with logprobs
    max_scored_tokens: int = Field(default=MAX_SCORED_TOKENS, ge=1, le=MAX_SCORED_TOKENS)
    in_flight_steps: int = Field(default=1, ge=0)  # steps without a result when one is planned
    tombstone_s: float = Field(default=60.0, ge=0.0)  # how long an early abort is remembered
    max_tombstones: int = Field(default=16384, ge=1)
