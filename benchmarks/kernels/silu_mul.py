"""silu(gate) * up: two thirds read, one third written.

Predicted on an H200, in a graph, at 1B / 8B: 2 µs for 1 token, 2.5 / 3 µs for 64, 4 / 6 µs for 256,
26 / 45 µs for 2048, which is 85 % of the read bandwidth. Up to 64 tokens all of it is in the L2
cache, as it is in serving, where the matrix product before wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.silu_mul import silu_mul

WIDTHS = {"1B": 8192, "8B": 14336}
TOKENS = (1, 64, 256, 2048)
NUM_SETS = 8


def cases() -> Iterator[Case]:
    """Every size."""
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            runs: list[Callable[[], None]] = [
                partial(silu_mul, _random(tokens, 2 * width), _random(tokens, width))
                for _ in range(NUM_SETS)
            ]
            num_bytes = 2 * 3 * tokens * width
            yield Case(f"silu_mul {model} T={tokens}", runs, num_bytes, 5.0 * tokens * width)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
