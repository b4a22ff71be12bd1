"""silu(gate) * up: two thirds read, one third written.

Predicted on an H200, in a graph, at 1B / 8B: 2 µs for 1 token, 2.5 / 3 µs for 64, 4 / 6 µs for 256,
26 / 45 µs for 2048, which is 85 % of the read bandwidth. Up to 64 tokens all of it is in the L2
cache, as it is in serving, where the matrix product before wrote it.

GELU by tanh is one exponential and one division, too, and takes as long (Gemma 3 4B: 10240 wide).
Squared ReLU without a gate (Nemotron 8B: 16384 wide) reads half and takes 2, 2.5, 5 and 35 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.rows.activations import act_mul, activate

WIDTHS = {"1B": 8192, "8B": 14336}
TOKENS = (1, 64, 256, 2048)
NUM_SETS = 8


def cases() -> Iterator[Case]:
    """Every size."""
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            runs: list[Callable[[], None]] = [
                partial(act_mul, _random(tokens, 2 * width), _random(tokens, width), "silu")
                for _ in range(NUM_SETS)
            ]
            num_bytes = 2 * 3 * tokens * width
            yield Case(f"act_mul {model} T={tokens}", runs, num_bytes, 5.0 * tokens * width)
    for tokens in TOKENS:
        yield _gelu(tokens, 10240)
        yield _relu2(tokens, 16384)


def _gelu(tokens: int, width: int) -> Case:
    runs: list[Callable[[], None]] = [
        partial(act_mul, _random(tokens, 2 * width), _random(tokens, width), "gelu_tanh")
        for _ in range(NUM_SETS)
    ]
    name = f"act_mul gelu_tanh {width} T={tokens}"
    return Case(name, runs, 2.0 * 3 * tokens * width, 9.0 * tokens * width)


def _relu2(tokens: int, width: int) -> Case:
    runs: list[Callable[[], None]] = [
        partial(activate, _random(tokens, width), _random(tokens, width), "relu2")
        for _ in range(NUM_SETS)
    ]
    name = f"activate relu2 {width} T={tokens}"
    return Case(name, runs, 2.0 * 2 * tokens * width, 2.0 * tokens * width)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
