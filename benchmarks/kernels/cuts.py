"""Cuts of S rows of V = 128256, by what is asked and how the logits lie; what each launch takes.

    python -m benchmarks.kernels cuts

What was predicted is in benchmarks/results/gpu_kernels.md.

Logits of a step of random weights are flat: half of the vocabulary is kept. Peaked ones have a few
ids far above the others, as most steps of a trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.case import Case
from benchmarks.kernels.sampling import PLAIN, SAMPLES, VOCAB_SIZE, Bench
from services.compute.kernels.sampling import top_k_top_p

WARM = replace(PLAIN, temperature=0.8)
ASKED = {
    "top_p 0.95": replace(WARM, top_p=0.95),
    "top_k 40": replace(WARM, top_k=40),
    "top_k 40 top_p 0.95": replace(WARM, top_k=40, top_p=0.95),
    "top_p 0.95 min_p 0.05": replace(WARM, top_p=0.95, min_p=0.05),
    "min_p 0.05": replace(WARM, min_p=0.05),
}
PROFILED = 10


def cases() -> Iterator[Case]:
    """All that may be asked, of flat and of peaked logits; prints the launches of top_p alone."""
    for samples in SAMPLES:
        bench = Bench.make(samples)
        peaked = replace(bench, logits=tuple(as_trained(each) for each in bench.logits))
        for name, sampling in ASKED.items():
            for shape, logits in (("flat", bench), ("peaked", peaked)):
                runs = logits.cuts(sampling, 1.0)
                yield Case(f"{name} {shape} S={samples}", runs, 4.0 * samples * VOCAB_SIZE)
        for shape, logits in (("flat", bench), ("peaked", peaked)):
            print_launches(f"top_p 0.95 {shape} S={samples}", logits.cuts(ASKED["top_p 0.95"], 1.0))
    for tiles, registers in ((1, 80), (2, 80), (4, 80), (2, 64), (2, 128)):
        cuts = bench.cuts(ASKED["top_p 0.95"], 1.0)
        runs = [partial(tuned, tiles, registers, run) for run in cuts]
        name = f"top_p 0.95 flat S=256, {tiles} tiles, {registers} registers"
        yield Case(name, runs, 4.0 * 256 * VOCAB_SIZE)


def tuned(tiles: int, registers: int, run: Callable[[], None]) -> None:
    """Let each program read so many tiles, with so many registers for a thread."""
    before = top_k_top_p.TILES_OF_MANY, top_k_top_p.MAX_REGISTERS
    top_k_top_p.TILES_OF_MANY, top_k_top_p.MAX_REGISTERS = tiles, registers
    run()
    top_k_top_p.TILES_OF_MANY, top_k_top_p.MAX_REGISTERS = before


def as_trained(logits_SV: torch.Tensor) -> torch.Tensor:
    """Wider, and five ids a row stand out."""
    logits_SV = logits_SV * 2.5
    logits_SV[:, 1000:1005] = torch.tensor([20.0, 18.5, 18.0, 16.0, 15.0], device="cuda")
    return logits_SV


def print_launches(name: str, runs: list[Callable[[], None]]) -> None:
    """A line for each kernel of these runs."""
    for run in runs:
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for turn in range(PROFILED):
            runs[turn % len(runs)]()
        torch.cuda.synchronize()
    for event in profiler.key_averages():
        if event.device_time_total:
            print(f"    {name}: {event.key:<12}{event.device_time_total / event.count:8.1f} µs")
