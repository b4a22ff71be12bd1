"""`python -m benchmarks.kernels matvec_sweep`: the constants of the matrix-vector kernels.

Times sensible cuts of each map of Llama-3.1-8B and 3.2-1B, then the best few under dependent
launch, and prints a table, from which config.py's constants are; benchmarks.gpu_tune does so for
other models. A
pool of processes compiles first, into Triton's cache on disk: some 500 kernels, half a second each.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import READ_BYTES_PER_S, Case
from benchmarks.kernels.matvec import EPS, MODELS, Model, cold_weights, draw
from services.compute.kernels.linear.matvec import gate_up, matvec, norm_gate_up, norm_matvec
from services.compute.kernels.linear.matvec_config import (
    MatvecConfig,
    gate_up_config,
    matvec_config,
    padded,
)
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.layers.weighted_layers import Norm

NUM_SMS = 132
SHARED_BYTES = 220 << 10
IN_FLIGHT = (40 << 10, 216 << 10)  # bytes for each multiprocessor, fewest and most
MOST_CUTS = 20
THREAD_BYTES = (32, 320)  # of weights, fewest and most, without padding
LONG_OUTPUTS = 50_000
NUM_BEST = 6
BUDGET_S = 60.0
CALLS, REPLAYS = 20, 6

W = TypeVar("W")
"""What a call takes in turn: weights, or layers of them."""


@dataclass(frozen=True, slots=True)
class Map:
    """One linear map: `kind` says which kernel: plain, gated, norm or norm gated."""

    name: str
    kind: str
    num_out: int
    num_in: int
    norms_behind: bool = False

    @property
    def num_bytes(self) -> float:
        return 2.0 * self.num_out * self.num_in

    @property
    def tiles(self) -> int:
        return 2 if self.kind.endswith("gated") else 1

    @property
    def default(self) -> MatvecConfig:
        if self.tiles == 2:
            return gate_up_config(self.num_out // 2, self.num_in, 2)
        is_normed = self.kind == "norm"
        return matvec_config(self.num_out, self.num_in, 2, is_normed)


@dataclass(frozen=True, slots=True)
class Job:
    """One compiled kernel."""

    map: Map
    config: MatvecConfig
    pdl: bool = False


def maps(model: Model) -> list[Map]:
    """The maps that share no constants; with norms behind parts, with norms and without."""
    width, behind = model.width, model.norms_behind
    found = [
        Map("qkv", "norm", model.qkv, width, behind),
        Map("o", "plain", width, model.mixed or width),
        Map("gate/up", "norm gated", 2 * model.inner, width, behind),
        Map("down", "plain", width, model.inner),
        Map("head", "plain", model.vocabulary, width),
    ]
    if behind:
        found.append(Map("qkv", "plain", model.qkv, width))
        found.append(Map("gate/up", "gated", 2 * model.inner, width))
    return [replace(m, name=f"{model.name} {m.name}") for m in found]


def cuts(m: Map) -> list[MatvecConfig]:
    """Cuts with enough bytes in flight, spread evenly if there are too many."""
    found = _cuts(m)
    return [m.default, *(config for config in found if config != m.default)]


def _thinned(found: list[MatvecConfig], most: int) -> list[MatvecConfig]:
    step = max(1.0, len(found) / most)
    return [found[int(i * step)] for i in range(int(len(found) / step))]


def _cuts(m: Map) -> list[MatvecConfig]:
    row_bytes = 2 * padded(m.num_in) * m.tiles
    outputs = m.num_out // m.tiles
    fewest, most = THREAD_BYTES
    found, whole = [], []
    for rows in (1, 2, 4, 8, 16):
        tile = rows * row_bytes
        for warps in (2, 4, 8, 16):
            if not fewest <= rows * m.tiles * 2 * m.num_in // (32 * warps) <= most:
                continue
            if 32 * warps * 16 > row_bytes // m.tiles * 2:
                continue
            if outputs // rows <= NUM_SMS * 64 // warps * 8:
                whole.append(MatvecConfig(rows, warps))
            for per_sm in (1, 2, 3, 4, 6, 8):
                for stages in (2, 3, 4, 6):
                    staged = per_sm * (stages - 1) * tile
                    turns = outputs / rows / (NUM_SMS * per_sm)
                    fits = staged <= SHARED_BYTES and per_sm * warps <= 48
                    if fits and IN_FLIGHT[0] <= staged <= IN_FLIGHT[1] and turns >= 1.0:
                        found.append(MatvecConfig(rows, warps, stages, programs=NUM_SMS * per_sm))
    # a long map hides its start and its end, so that fewer cuts tell the best
    return _thinned(found, MOST_CUTS if outputs < LONG_OUTPUTS else MOST_CUTS // 2) + whole


@cache
def _rows_of(m: Map) -> tuple[NormedInput, Tensor]:
    x, delta = draw(1, m.num_in), draw(1, m.num_in)
    out = torch.empty(1, m.num_out // m.tiles, device="cuda", dtype=x.dtype)
    norm = Norm(draw(m.num_in), EPS)
    if m.norms_behind:  # as Gemma's
        norm = Norm(draw(m.num_in).float(), EPS, round_first=False)
    post = norm if m.norms_behind else None
    return NormedInput(x, delta, norm, torch.empty_like(x), post), out


def call(job: Job, weight: Tensor) -> None:
    """Launch it."""
    normed, out = _rows_of(job.map)
    if job.map.kind == "plain":
        matvec(normed.x_TE, weight, None, out, config=job.config, pdl=job.pdl)
    elif job.map.kind == "norm":
        norm_matvec(normed, weight, None, out, config=job.config, pdl=job.pdl)
    elif job.map.kind == "gated":
        gate_up(normed.x_TE, weight, out, "silu", config=job.config, pdl=job.pdl)
    else:
        norm_gate_up(normed, weight, out, "silu", config=job.config, pdl=job.pdl)


@cache
def _any_weight(m: Map) -> Tensor:
    return torch.zeros(m.num_out, m.num_in, device="cuda", dtype=torch.bfloat16)


def compile_one(job: Job) -> str:
    """In a process of the pool: what went wrong, or nothing."""
    try:
        call(job, _any_weight(job.map))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly: the cut is passed over
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def time_s(run: Callable[[W], object], weights: Sequence[W]) -> float:
    """Seconds of one call, the best of a few replays of a graph of 20."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(weights[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for turn in range(CALLS):
            run(weights[turn % len(weights)])
    best = float("inf")
    graph.replay()
    for _ in range(REPLAYS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / CALLS)
    return best


class Sweep:
    """Compiles in the pool, and times here while the pool is idle."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._began = time.monotonic()
        self.failures: dict[str, int] = {}

    def compiled(self, jobs: list[Job]) -> list[Job]:
        """Those that compile and launch, once all have been tried."""
        tried = list(zip(jobs, [self._pool.submit(compile_one, job) for job in jobs], strict=True))
        good = []
        for job, future in tried:
            if problem := future.result():
                self._fail(problem)
            else:
                good.append(job)
        self.say(f"{len(good)} of {len(jobs)} compiled")
        return good

    def times(self, jobs: list[Job], weights: list[Tensor]) -> dict[Job, float]:
        """Seconds of those that are reached in time."""
        found = {}
        for job in jobs:
            if time.monotonic() - self._began > BUDGET_S:
                self._fail("out of time")
            else:
                found[job] = time_s(partial(call, job), weights)
        return found

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def _fail(self, problem: str) -> None:
        self.failures[problem] = self.failures.get(problem, 0) + 1


def best(m: Map, single: dict[Job, float]) -> list[Job]:
    """The fastest few, and the present cut."""
    order = sorted(single, key=lambda job: single[job])
    now = [job for job in order if job.config == m.default]
    return list(dict.fromkeys([*order[:NUM_BEST], *now]))


def report(m: Map, times: dict[Job, float], blas_s: float) -> None:
    """A line for cuBLAS and one for each of the best cuts."""
    floor_s = m.num_bytes / READ_BYTES_PER_S
    print(
        f"{m.name} ({m.kind}) {m.num_out}x{m.num_in}: floor {floor_s * 1e6:.1f} µs, "
        f"cuBLAS {blas_s * 1e6:.2f} µs {m.num_bytes / blas_s / 1e12:.2f} TB/s"
    )
    for job in best(m, {j: t for j, t in times.items() if not j.pdl}):
        c, seconds = job.config, times[job]
        print(
            f"  rows {c.rows:<2} warps {c.num_warps:<2} stages {c.num_stages} "
            f"programs {min(c.programs, m.num_out // m.tiles // c.rows):<6}"
            f"{seconds * 1e6:6.2f} µs {m.num_bytes / seconds / 1e12:4.2f} TB/s"
            f"  pdl {_micros(times.get(replace(job, pdl=True)))}"
            f"{'  (now)' if c == m.default else ''}",
            flush=True,
        )


def _micros(seconds: float | None) -> str:
    return "     -" if seconds is None else f"{seconds * 1e6:6.2f}"


def sweep(pool: ProcessPoolExecutor, models: Sequence[Model]) -> dict[Map, MatvecConfig]:
    """Print the tables; the fastest cuts, with or without dependent launch."""
    run = Sweep(pool)
    found = [m for model in models for m in maps(model)]
    good = run.compiled([Job(m, config) for m in found for config in cuts(m)])
    times: dict[Job, float] = {}
    blas_s = {}
    for m in found:
        weights, x = cold_weights(m.num_out, m.num_in), draw(1, m.num_in)
        blas_s[m] = time_s(partial(F.linear, x), weights)
        times |= run.times([job for job in good if job.map == m], weights)
    run.say("timed")
    chosen = [job for m in found for job in best(m, {j: t for j, t in times.items() if j.map == m})]
    good = run.compiled([replace(job, pdl=True) for job in chosen])
    for m in found:
        weights = cold_weights(m.num_out, m.num_in)
        times |= run.times([job for job in good if job.map == m], weights)
        report(m, {j: t for j, t in times.items() if j.map == m}, blas_s[m])
    for problem, count in run.failures.items():
        print(f"passed over {count}: {problem}")
    run.say("done")
    fastest: dict[Map, MatvecConfig] = {}
    for job in sorted(times, key=times.__getitem__):
        fastest.setdefault(job.map, job.config)
    return fastest


def compilers() -> ProcessPoolExecutor:
    """A process for each core but two."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def cases() -> Iterator[Case]:
    """None: a sweep prints a table of its own."""
    with compilers() as pool:
        sweep(pool, MODELS[:2])
    yield from ()
