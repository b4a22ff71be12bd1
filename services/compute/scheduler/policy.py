"""What a school of batching decides: how much of which work the next step may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ANY_NUMBER = 1 << 30


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
    """Room of one kind of step: decode rows or not, prompt tokens, newcomers that may start.

    Preempted sequences may resume whenever there are prompt tokens to spend.
    """

    decode: bool
    prefill_tokens: int
    new_sequences: int


class BatchPolicy(Protocol):
    """A school of batching."""

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """Say what the next step may hold: the first of these that yields any row is taken."""
        ...

    def wake_at_s(self) -> float | None:
        """When the answer may change by the passing of time alone."""
        ...
