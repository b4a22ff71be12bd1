"""Addition and RMS norm: x and delta read, x and out written.

Predicted on an H200, in a graph, at 1B / 8B: 2 µs for 1 and 64 tokens (a launch, a load and a sum
over the row), 2.5 / 3 µs for 256, 10 / 18 µs for 2048, which is 75 to 85 % of the read bandwidth.
Up to 256 tokens all of it is in the L2 cache, as in serving, where the kernel before wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.rms_norm import add_rms_norm

WIDTHS = {"1B": 2048, "8B": 4096}
TOKENS = (1, 64, 256, 2048)
SAMPLES = 256
NUM_SETS = 8
EPS = 1e-5


def cases() -> Iterator[Case]:
    """Every size, and the final norm of 256 sampled tokens among 2048."""
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            yield _whole(f"add_rms_norm {model} T={tokens}", tokens, width)
        yield _gathered(f"add_rms_norm gathered {model} S={SAMPLES}", SAMPLES, width)


def _whole(name: str, tokens: int, width: int) -> Case:
    weight = _random(width)
    runs: list[Callable[[], None]] = [
        partial(
            add_rms_norm,
            _random(tokens, width),
            _random(tokens, width) * 1e-3,  # added again at every replay: x must stay finite
            weight,
            EPS,
            _random(tokens, width),
        )
        for _ in range(NUM_SETS)
    ]
    return Case(name, runs, 2 * (4 * tokens * width + width), 6.0 * tokens * width)


def _gathered(name: str, samples: int, width: int) -> Case:
    weight = _random(width)
    index = torch.randperm(2048, device="cuda")[:samples].int()
    runs: list[Callable[[], None]] = [
        partial(
            add_rms_norm,
            _random(2048, width),
            _random(2048, width),
            weight,
            EPS,
            _random(samples, width),
            index_S=index,
        )
        for _ in range(NUM_SETS)
    ]
    return Case(name, runs, 2 * (3 * samples * width + width), 6.0 * samples * width)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
