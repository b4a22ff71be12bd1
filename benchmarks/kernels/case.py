"""One kernel at one size: what it must move and compute, and how long it takes.

Times are of replays of a captured CUDA graph, so that launches cost what they cost while serving.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

READ_BYTES_PER_S = 4.5e12  # H200, measured by a reading kernel
FLOPS_PER_S = 650e12  # H200, bf16 products at these shapes
CALLS_PER_GRAPH = 20
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Case:
    """`runs` are the same call on different inputs, taken in turn so that no cache is warm."""

    name: str
    runs: Sequence[Callable[[], None]]
    num_bytes: float  # read once and written once
    flops: float = 0.0

    @property
    def floor_s(self) -> float:
        """The time below which no kernel can do this on the H200."""
        return max(self.num_bytes / READ_BYTES_PER_S, self.flops / FLOPS_PER_S)


def time_s(case: Case) -> float:
    """Median seconds of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in case.runs:  # compiles
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in range(CALLS_PER_GRAPH):
            case.runs[call % len(case.runs)]()
    graph.replay()
    return replay_s(graph) / CALLS_PER_GRAPH


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a graph's launches, one by one."""
    times = []
    for _ in range(REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def line(case: Case, seconds: float) -> str:
    """One row of the table."""
    return (
        f"{case.name:<58}{seconds * 1e6:9.1f} µs{case.num_bytes / seconds / 1e12:7.2f} TB/s"
        f"{case.flops / seconds / 1e12:7.0f} TFLOP/s   floor {case.floor_s * 1e6:8.1f} µs"
        f"{case.floor_s / seconds:7.0%}"
    )
