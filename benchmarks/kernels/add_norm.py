"""Addition and RMS norm: x and delta read, x and out written.

Predicted on an H200, in a graph, at 1B / 8B: 2 µs for 1 and 64 tokens (a launch, a load and a sum
over the row), 2.5 / 3 µs for 256, 10 / 18 µs for 2048, which is 75 to 85 % of the read bandwidth.
Up to 256 tokens all of it is in the L2 cache, as in serving, where the kernel before wrote it.

The sandwich of Gemma 3 (norm of delta, addition, norm of the sum) moves the same and two float32
weights, and sums over the row twice, one after the other: 2.4 µs for 1 and 64 tokens, 3 for 256, 12
for 2048 (10 are the bytes) at 4B's width of 2560. Layer norm, too, has two sums: 2.3, 2.8 and 14 µs
at 3072. An addition alone (OLMo 2) writes a third less: 2, 2.5 and 14 µs at 4096 with its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.layers.weighted_layers import Norm

WIDTHS = {"1B": 2048, "8B": 4096}
TOKENS = (1, 64, 256, 2048)
SAMPLES = 256
NUM_SETS = 8
EPS = 1e-5


def cases() -> Iterator[Case]:
    """Every size, and the final norm of 256 sampled tokens among 2048."""
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            yield _whole(f"add_norm {model} T={tokens}", tokens, width)
        yield _gathered(f"add_norm gathered {model} S={SAMPLES}", SAMPLES, width)
    for form in ("sandwich", "layer", "behind"):
        for tokens in TOKENS:
            yield _formed(form, tokens)


def _whole(name: str, tokens: int, width: int) -> Case:
    norm = Norm(_random(width), EPS)
    runs: list[Callable[[], None]] = [
        partial(
            add_norm,
            _random(tokens, width),
            _random(tokens, width) * 1e-3,  # added again at every replay: x must stay finite
            norm,
            _random(tokens, width),
        )
        for _ in range(NUM_SETS)
    ]
    return Case(name, runs, 2 * (4 * tokens * width + width), 6.0 * tokens * width)


def _formed(form: str, tokens: int) -> Case:
    width = {"sandwich": 2560, "layer": 3072, "behind": 4096}[form]
    wide = Norm(torch.ones(width, device="cuda"), EPS, round_first=False)
    layer = Norm(_random(width), EPS, "layer", _random(width), round_first=False)
    norm = {"sandwich": wide, "layer": layer, "behind": None}[form]
    post = None if form == "layer" else wide

    def run(x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor) -> None:
        add_norm(x, delta, norm, None if norm is None else out, post=post)

    runs: list[Callable[[], None]] = [
        partial(
            run,
            _random(tokens, width) * 1e3,  # what a post norm adds is near 1: x must stay finite
            _random(tokens, width),
            _random(tokens, width),
        )
        for _ in range(NUM_SETS)
    ]
    num_bytes = 2.0 * (3 if norm is None else 4) * tokens * width + 4 * width
    return Case(f"add_norm {form} {width} T={tokens}", runs, num_bytes, 12.0 * tokens * width)


def _gathered(name: str, samples: int, width: int) -> Case:
    norm = Norm(_random(width), EPS)
    index = torch.randperm(2048, device="cuda")[:samples].int()
    runs: list[Callable[[], None]] = [
        partial(
            add_norm,
            _random(2048, width),
            _random(2048, width),
            norm,
            _random(samples, width),
            index_S=index,
        )
        for _ in range(NUM_SETS)
    ]
    return Case(name, runs, 2 * (3 * samples * width + width), 6.0 * samples * width)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
