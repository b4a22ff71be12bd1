"""The scheduling policies by the names of the `schedule` setting; the scheduler is given one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

PolicyName = Literal["decode_first", "prefill_first", "static_batch"]


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


class DecodeFirst:
    """The default: every running sequence gets its token each step; prompts fill the rest.

    After Sarathi-Serve (chunked prefills, stall-free batching) and Orca (iteration level).
    """

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        return (Quota(True, view.max_prefill_tokens, ANY_NUMBER),)

    def wake_at_s(self) -> float | None:
        return None


class PrefillFirst:
    """For comparison: a step is either prompts or decode rows, prompts first, as in early vLLM.

    Short waits for the first token, uneven ones after it.
    """

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        return (Quota(False, view.max_prefill_tokens, ANY_NUMBER), Quota(True, 0, 0))

    def wake_at_s(self) -> float | None:
        return None


class StaticBatch:
    """For comparison: a batch gathers for a while and runs to its end before the next starts.

    It closes when it is full, or `window_s` after its first request was seen.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._gathering_since_s: float | None = None
        self._wake_at_s: float | None = None
        self._full_at = 0  # the count of started sequences at which the batch is complete

    def quotas(self, view: BatchView, now_s: float) -> tuple[Quota, ...]:
        """Return mixed steps for the batch that runs; nothing while the next one gathers."""
        self._wake_at_s = None
        missing = max(self._full_at - view.num_started_total, 0)
        if view.num_new <= missing:
            self._gathering_since_s = None
        elif self._gathering_since_s is None:
            self._gathering_since_s = now_s
        under_way = view.num_running or view.num_resumable or (missing and view.num_new)
        if not under_way:
            missing = self._close(view, now_s)
            if not missing:
                return ()
        return (Quota(True, view.max_prefill_tokens, missing),)

    def wake_at_s(self) -> float | None:
        return self._wake_at_s

    def _close(self, view: BatchView, now_s: float) -> int:
        since_s = self._gathering_since_s
        self._full_at = view.num_started_total
        if since_s is None:
            return 0
        if view.num_new < view.max_num_seqs and now_s < since_s + self._window_s:
            self._wake_at_s = since_s + self._window_s
            return 0
        size = min(view.num_new, view.max_num_seqs)
        self._full_at += size
        self._gathering_since_s = None
        return size


def make_policy(name: PolicyName, static_batch_window_s: float) -> SchedulingPolicy:
    policies: dict[PolicyName, SchedulingPolicy] = {
        "decode_first": DecodeFirst(),
        "prefill_first": PrefillFirst(),
        "static_batch": StaticBatch(static_batch_window_s),
    }
    return policies[name]
