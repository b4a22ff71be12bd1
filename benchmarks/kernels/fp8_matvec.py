"""A layer's four products of one row with FP8, by programs that walk and by programs of one block,
for a second each: what reads so fast takes a GPU to its power limit, and its clocks fall with time.

Predicted on an H200 from the bytes at 4.5 TB/s: 48.5 us a layer of 8B and 190 of 70B. A kernel that
only reads made 4.2 TB/s of gates and ups of 70B, at 670 of 700 watts.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import EPS, MODELS, Model
from benchmarks.kernels.matvec import draw as draw_bf16
from benchmarks.kernels.packed import draw
from services.compute.kernels.linear.matvec import matvec, norm_gate_up, norm_matvec
from services.compute.kernels.linear.matvec_config import (
    MatvecConfig,
    gate_up_config,
    matvec_config,
)
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.layers.weighted_layers import Norm

SIZES = (MODELS[0], Model("70B", width=8192, qkv=10240, inner=28672, vocabulary=128256))
NUM_LAYERS = 8
NUM_CALLS = 48
SECONDS = 1.0
CLOCKS = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")


class Layers:
    """Some layers' weights, and the rows that go through them."""

    def __init__(self, model: Model) -> None:
        width, inner = model.width, model.inner
        shapes = ((model.qkv, width), (width, width), (2 * inner, width), (width, inner))
        self.model = model
        self.weights = [[draw("fp8", *shape, 0) for shape in shapes] for _ in range(NUM_LAYERS)]
        self.x, self.delta, self.sum = (draw_bf16(1, width) for _ in range(3))
        self.mixed, self.gated = draw_bf16(1, model.qkv), draw_bf16(1, inner)
        self.norm = Norm(torch.ones(width, device="cuda", dtype=torch.bfloat16), EPS)

    def multiply(self, layer: int, *, walking: bool, pdl: bool) -> None:
        """Four launches; those that do not walk are given their blocks."""
        qkv, out, gates, down = self.weights[layer % NUM_LAYERS]
        width, inner = self.model.width, self.model.inner
        first = NormedInput(self.x, self.delta, self.norm, self.sum)
        second = NormedInput(self.sum, self.delta, self.norm, self.x)
        blocks: list[MatvecConfig | None] = [
            matvec_config(self.model.qkv, width, 1, normed=True),
            matvec_config(width, width, 1),
            gate_up_config(inner, width, 1),
            matvec_config(width, inner, 1),
        ]
        a, b, c, d = [None] * 4 if walking else blocks
        norm_matvec(first, qkv, None, self.mixed, config=a, pdl=pdl)
        matvec(self.mixed[:, :width], out, None, self.delta, config=b, pdl=pdl)
        norm_gate_up(second, gates, self.gated, "silu", config=c, pdl=pdl)
        matvec(self.gated, down, None, self.delta, config=d, pdl=pdl)


def watch(layers: Layers, *, walking: bool, pdl: bool) -> str:
    """Microseconds of a layer at first and in the end, and what the GPU says of itself there."""
    multiply = partial(layers.multiply, walking=walking, pdl=pdl)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        multiply(0)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(NUM_CALLS):
            multiply(layer)
    times_us: list[float] = []
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times_us.append(begin.elapsed_time(end) * 1e3 / (10 * NUM_CALLS))
    clocks = subprocess.run(CLOCKS, capture_output=True, text=True, check=False).stdout.strip()
    return f"first {times_us[0]:.1f} us, then {sorted(times_us[-8:])[4]:.1f}, {clocks}"


def cases() -> Iterator[Case]:
    """None: it prints a table of its own."""
    for model in SIZES:
        layers = Layers(model)
        for pdl in (False, True):
            for walking in (False, True):
                how = "walking" if walking else "one block each"
                how += ", dependent launches" if pdl else ""
                print(f"{model.name} {how}: {watch(layers, walking=walking, pdl=pdl)}", flush=True)
    yield from ()
