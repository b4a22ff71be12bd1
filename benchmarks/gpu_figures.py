"""What a workload's run came to, and what it is held against: vLLM, goals, the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu_client import Outcome
from benchmarks.gpu_timeline import DeviceTimes
from benchmarks.gpu_workloads import Ask

RECORDED_BY = "vLLM 0.26.0, one H200, 2026-11-20"
RECORDED_HOW = (
    "its front end in Rust, CUDA graphs and FlashAttention 3 on, bf16, 16 cores, torch 2.11, the "
    "same requests"
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What vLLM did, as `RECORDED_BY` says, in tokens per second and milliseconds."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    tpot_mean_ms: float
    engine_cpu_share: float  # processor seconds of its engine process per second
    first: float  # tokens/s to reach first
    goal: float
    roof: float  # nothing but weights, KV and matrix products at the rates measured on an H200


RECORDED = {
    ("llama-8b", "A"): Recorded(198, 11.7, 12.4, 5.02, 5.02, 4.5 / 10.5, 200, 240, 285),
    ("llama-8b", "B"): Recorded(5830, 29.5, 342, 6.28, 7.66, 5.5 / 8.8, 6000, 7200, 8490),
    ("llama-8b", "C"): Recorded(10690, 65, 1356, 15.3, 19.0, 12.3 / 19.1, 11000, 12500, 14080),
    ("llama-1b", "A"): Recorded(690, 7.5, 10.1, 1.40, 1.44, 3.1 / 3.0, 720, 1000, 1505),
    ("llama-1b", "B"): Recorded(14530, 15.9, 78, 2.61, 3.37, 3.6 / 3.5, 18000, 28000, 43900),
    ("llama-1b", "C"): Recorded(25150, 34, 254, 7.10, 8.87, 8.3 / 8.1, 35000, 50000, 72700),
}
TTFT_FIRST_AND_GOAL_MS = {("llama-8b", "A"): (11, 8), ("llama-8b", "C"): (60, 45)}


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one workload; seconds where the name says nothing else."""

    num_requests: int
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    num_events: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    tpot_mean_s: float
    client_share: float  # of one core, the busiest client process
    client_cpu_per_token_s: float
    cpu_s: dict[str, float] = field(default_factory=dict)  # of the server's processes, by name
    problems: tuple[str, ...] = ()
    device: DeviceTimes | None = None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, from the first request to the end of the last."""
        return self.output_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        """Requests ended per second."""
        return self.num_requests / self.wall_s

    def cpu_share(self, service: str) -> float:
        """Processor seconds per second of the busiest process of a service."""
        found = [cpu for name, cpu in self.cpu_s.items() if name.startswith(service)]
        return max(found, default=0.0) / self.wall_s


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share lies, between the two next to it; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def figures_of(asks: Sequence[Ask], outcome: Outcome, cpu_s: dict[str, float]) -> Figures:
    """Sum up a run; `problems` names every way in which an answer was not as asked."""
    answered = [reply for reply in outcome.replies if not reply.error and reply.usage]
    used = [int(reply.usage["completion_tokens"]) for reply in answered]
    gaps = [gap for reply in answered for gap in reply.gaps_s]
    per_token = [
        (reply.last_s - reply.first_s) / (count - 1)
        for reply, count in zip(answered, used, strict=True)
        if count > 1
    ]
    waits = [reply.first_s - reply.sent_s for reply in answered if reply.first_s]
    output_tokens = sum(used)
    return Figures(
        num_requests=len(answered),
        wall_s=max(outcome.wall_s, 1e-9),
        prompt_tokens=sum(int(reply.usage["prompt_tokens"]) for reply in answered),
        output_tokens=output_tokens,
        cached_tokens=sum(_cached(reply.usage) for reply in answered),
        num_events=sum(reply.num_events for reply in answered),
        ttft_p50_s=percentile(waits, 0.5),
        ttft_p99_s=percentile(waits, 0.99),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p99_s=percentile(gaps, 0.99),
        tpot_mean_s=sum(per_token) / len(per_token) if per_token else 0.0,
        client_share=max(outcome.client_cpu_s) / max(outcome.wall_s, 1e-9),
        client_cpu_per_token_s=sum(outcome.client_cpu_s) / max(output_tokens, 1),
        cpu_s=cpu_s,
        problems=_problems(asks, outcome),
    )


def _cached(usage: dict[str, object]) -> int:
    details = usage.get("prompt_tokens_details")
    return int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0


def _problems(asks: Sequence[Ask], outcome: Outcome) -> tuple[str, ...]:
    """Say what is wrong with the replies, each kind once with its first case."""
    found: dict[str, list[str]] = {}

    def wrong(kind: str, detail: str) -> None:
        found.setdefault(kind, []).append(detail)

    answered = {reply.number for reply in outcome.replies}
    if missing := len(asks) - len(answered):
        found["requests never sent"] = [str(missing)]
    for reply in outcome.replies:
        ask = asks[reply.number]
        where = f"request {reply.number}"
        if reply.error:
            wrong("requests failed", f"{where}: {reply.error}")
        elif not reply.usage:
            wrong("answers without usage", where)
        else:
            sent, used = reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
            if used != ask.max_tokens:
                wrong("answers of another length", f"{where}: {used} for {ask.max_tokens}")
            if sent != len(ask.prompt_ids):
                wrong("prompts of another length", f"{where}: {sent} for {len(ask.prompt_ids)}")
    return tuple(f"{len(cases)} {kind} ({cases[0]})" for kind, cases in found.items())
