"""What passes between the scheduler and its engine: limits, outputs, counts, and policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from common.config import Settings
from common.messages.address import Address, AttemptId
from common.messages.failure import Ending
from common.messages.logprobs import PromptLogprobs
from common.messages.tokens import TokenLogprobs
from services.compute.step import MAX_SCORED_TOKENS, Int32Array

ANY_NUMBER = 1 << 30


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


@dataclass(slots=True)  # not frozen: that would take 0.72 us to make, not 0.15; never change one
class SequenceOutput:
    """New tokens of one sequence, its end, or both.

    `opened` marks the first output of the attempt; only there and with `ending` is the header
    read. `first_index` continues where the output before ended (len(output_ids) at the start):
    outputs of one attempt never overlap or leave a gap.
    """

    attempt: AttemptId
    detokenizer: Address
    header: bytes
    first_index: int
    token_ids: tuple[int, ...]
    num_logprobs: int = -1
    logprobs: tuple[TokenLogprobs, ...] = ()
    opened: bool = False
    ending: Ending | None = None
    prompt_tokens: int = 0  # with `opened`
    cached_tokens: int = 0  # with `opened`
    scored: tuple[PromptLogprobs, ...] = ()
    queued_s: float | None = None  # with `opened`


class StepTokens(NamedTuple):
    """One more token, and nothing else, of each of many sequences.

    In most steps those are most sequences, and at 256 of them an output each costs 0.1 ms.
    Sequence s is attempt (`router`, counter_S[s]); its token is the output of number index_S[s].
    """

    detokenizer: Address
    router: str
    counter_S: npt.NDArray[np.int64]
    index_S: Int32Array
    token_S: Int32Array


Output: TypeAlias = SequenceOutput | StepTokens


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for heartbeats and metrics."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_slots: int  # most that can run
    pages_total: int
    pages_free: int  # never used or evictable at once
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a policy may know. Resumable sequences have run before and were preempted."""

    num_running: int
    num_new: int
    num_resumable: int
    num_started_total: int
    max_num_seqs: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Room of one kind of step: decode rows or not, prompt tokens, new sequences that may start.

    Preempted sequences may resume whenever there are prompt tokens to spend.
    """

    decode: bool
    prefill_tokens: int
    new_sequences: int


class SchedulingPolicy(Protocol):
    """Decides how much of which work the next step may hold."""

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """Return what the next step may hold: the first of these that yields any row is taken."""
        ...

    def wake_at_s(self) -> float | None:
        """Return when the answer may change by the passing of time alone."""
        ...
