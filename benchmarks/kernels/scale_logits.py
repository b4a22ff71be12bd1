"""Scale and soft cap of logits: every one read and written, 8 bytes.

Predicted on an H200, in a graph, for Gemma 2's 256,000: 2.5 µs for 1 row, 32 for 64 (131 MB at 4.2
TB/s, but half of it is still in the L2 cache from the product before), 125 for 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.sampling.scale_logits import scale_logits

VOCABULARY = 256_000
SAMPLES = (1, 64, 256)
NUM_SETS = 4


def cases() -> Iterator[Case]:
    """A cap, and a scale alone."""
    for samples in SAMPLES:
        for name, scale, softcap in (("cap", 1.0, 30.0), ("scale", 0.0625, 0.0)):
            runs: list[Callable[[], None]] = [
                partial(
                    scale_logits,
                    torch.randn(samples, VOCABULARY, device="cuda"),
                    scale=scale,
                    softcap=softcap,
                )
                for _ in range(NUM_SETS)
            ]
            yield Case(f"scale_logits {name} S={samples}", runs, 8.0 * samples * VOCABULARY)
