"""Counts and latencies of requests, by model: what `/metrics` has as histograms; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, TypeAlias

from common.messages.failure import Usage

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

# The bounds are vLLM's, so that dashboards made for it show the same buckets.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Weighted observations, counted in buckets of `bounds[i - 1] < value <= bounds[i]`."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is of larger values
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count a value `weight` times, which may be 0."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight


class RequestStats:
    """The requests for one model, each choice of a request counted by itself, as vLLM does."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_retries = 0  # attempts after the first
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(
            ("stop", "length", "abort", "error"), 0
        )
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.inter_token_s = Histogram(INTER_TOKEN_S)
        self.decode_s = Histogram(REQUEST_S)
        self.latency_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(TOKENS)
        self.generated_tokens = Histogram(TOKENS)

    def add_prompt(
        self, num_tokens: int, num_cached_tokens: int, queued_s: float | None = None
    ) -> None:
        """Count the prompt of a choice, and the time that it waited at compute, if known."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        if queued_s is not None:
            self.queue_s.observe(queued_s)

    def add_first_token(self, elapsed_s: float, queued_s: float | None) -> None:
        """Count the first token of a choice, `elapsed_s` after its admission."""
        self.first_token_s.observe(elapsed_s)
        if queued_s is not None:
            self.prefill_s.observe(max(0.0, elapsed_s - queued_s))

    def add_finished(
        self, reason: Literal["stop", "length"], usage: Usage, latency_s: float, decode_s: float
    ) -> None:
        """Count a choice that has ended; `decode_s` is the time since its first token."""
        self.num_finished[reason] += 1
        self.latency_s.observe(latency_s)
        self.decode_s.observe(decode_s)
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generated_tokens.observe(usage.completion_tokens)
