"""The figures of a run under load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.bench.client import LoadResult
from services.bench.workloads import BenchRequest


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some times; all 0 if there were none."""

    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls()
        percentiles = np.percentile(values, (50, 90, 99))
        return cls(sum(values) / len(values), *map(float, percentiles))


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one workload; `problems` names each way in which answers were not as requested.

    `ttft` is until the first token, `itl` between events with tokens, `tpot` for each token of a
    request after its first, `latency` of whole requests.
    """

    num_requests: int  # that were answered
    num_failed: int
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    num_events: int
    ttft: Spread
    itl: Spread
    tpot: Spread
    latency: Spread
    client_share: float  # of one core, the busiest client process
    client_cpu_per_token_s: float
    problems: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, from the first request to the end of the last."""
        return self.output_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.wall_s


def figures_of(requests: Sequence[BenchRequest], outcome: LoadResult) -> Figures:
    answered = [reply for reply in outcome.replies if not reply.error and reply.usage]
    used = [int(reply.usage["completion_tokens"]) for reply in answered]
    per_token = [
        (reply.last_s - reply.first_s) / (count - 1)
        for reply, count in zip(answered, used, strict=True)
        if count > 1
    ]
    output_tokens = sum(used)
    wall_s = max(outcome.wall_s, 1e-9)
    return Figures(
        num_requests=len(answered),
        num_failed=len(requests) - len(answered),
        wall_s=wall_s,
        prompt_tokens=sum(int(reply.usage["prompt_tokens"]) for reply in answered),
        output_tokens=output_tokens,
        cached_tokens=sum(_cached(reply.usage) for reply in answered),
        num_events=sum(reply.num_events for reply in answered),
        ttft=Spread.of([reply.first_s - reply.sent_s for reply in answered if reply.first_s]),
        itl=Spread.of([gap for reply in answered for gap in reply.gaps_s]),
        tpot=Spread.of(per_token),
        latency=Spread.of([reply.end_s - reply.sent_s for reply in answered]),
        client_share=max(outcome.client_cpu_s, default=0.0) / wall_s,
        client_cpu_per_token_s=sum(outcome.client_cpu_s) / max(output_tokens, 1),
        problems=_problems(requests, outcome),
    )


def _cached(usage: dict[str, object]) -> int:
    details = usage.get("prompt_tokens_details")
    return int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0


def _problems(requests: Sequence[BenchRequest], outcome: LoadResult) -> tuple[str, ...]:
    """Describe what is wrong with the replies: each kind once, with its first case."""
    cases_of: dict[str, list[str]] = {}

    def wrong(kind: str, detail: str) -> None:
        cases_of.setdefault(kind, []).append(detail)

    answered = {reply.number for reply in outcome.replies}
    if missing := len(requests) - len(answered):
        cases_of["requests never sent"] = [str(missing)]
    for reply in outcome.replies:
        request = requests[reply.number]
        where = f"request {reply.number}"
        if reply.error:
            wrong("requests failed", f"{where}: {reply.error}")
        elif not reply.usage:
            wrong("answers without usage", where)
        else:
            sent, used = reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
            if used != request.max_tokens:
                wrong("answers of another length", f"{where}: {used} for {request.max_tokens}")
            if not request.text and sent != len(request.prompt_ids):
                wrong("prompts of another length", f"{where}: {sent} for {len(request.prompt_ids)}")
    return tuple(f"{len(cases)} {kind} ({cases[0]})" for kind, cases in cases_of.items())
