"""What a workload's run came to, and what it is held against: vLLM, goals, the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from benchmarks.gpu_timeline import DeviceTimes
from services.bench.client import LoadResult
from services.bench.figures import Figures, figures_of
from services.bench.workloads import BenchRequest

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
class GpuFigures(Figures):
    """A run with what the server's processes and its device did meanwhile."""

    cpu_s: dict[str, float] = field(default_factory=dict)  # of the server's processes, by name
    device: DeviceTimes | None = None

    def cpu_share(self, service: str) -> float:
        """Processor seconds per second of the busiest process of a service."""
        found = [cpu for name, cpu in self.cpu_s.items() if name.startswith(service)]
        return max(found, default=0.0) / self.wall_s


def gpu_figures_of(
    asks: Sequence[BenchRequest],
    outcome: LoadResult,
    cpu_s: dict[str, float],
    device: DeviceTimes | None = None,
) -> GpuFigures:
    """Sum up a run."""
    figures = figures_of(asks, outcome)
    shared = {each.name: getattr(figures, each.name) for each in fields(figures)}
    return GpuFigures(**shared, cpu_s=cpu_s, device=device)
