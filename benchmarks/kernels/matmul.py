"""The batch-invariant products beside cuBLAS, for the four linear maps of a layer; for those that
end a part also in eight segments, which is what they are made of.

Predicted on an H200: up to 64 tokens the weight's bytes at 2 to 3 TB/s for qkv, out and down (48 to
96 programs stream it, where cuBLAS splits K) and at 3.5 TB/s for gate and up; at 256 tokens between
bytes and arithmetic; at 2048 tokens 200 to 300 TFLOP/s, since tiles of 64 rows read the weight so
often that the L2 cache bounds them. So about 1.5 times cuBLAS's time at small batches and 2.5 times
at large ones: the price of `batch_invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import CALLS_PER_GRAPH, Case
from services.compute.kernels.linear.matmul import matmul
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.summed_matmul import summed_matmul
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS

LINEARS = {
    "1B qkv": (2048, 3072),
    "1B out": (2048, 2048),
    "1B gate_up": (2048, 16384),
    "1B down": (8192, 2048),
    "8B qkv": (4096, 6144),
    "8B out": (4096, 4096),
    "8B gate_up": (4096, 28672),
    "8B down": (14336, 4096),
}
"""Columns in and out."""
ENDS = ("out", "down")
TOKENS = (1, 64, 256, 2048)
COLD_BYTES = 200e6  # of weights in turn: four times the L2 cache


def cases() -> Iterator[Case]:
    """Ours, then torch's, for each map and size."""
    work = SkinnyWork.make(max(num_out for _, num_out in LINEARS.values()), torch.device("cuda"))
    for name, (num_in, num_out) in LINEARS.items():
        num_sets = min(max(int(COLD_BYTES / (2 * num_in * num_out)), 2), CALLS_PER_GRAPH)
        weights = [_random(num_out, num_in) for _ in range(num_sets)]
        for tokens in TOKENS:
            x, out = _random(tokens, num_in), _random(tokens, num_out)
            num_bytes = 2 * (num_in * num_out + tokens * (num_in + num_out))
            flops = 2.0 * tokens * num_in * num_out
            ours: list[Callable[[], None]] = [partial(matmul, x, w, None, out) for w in weights]
            theirs = [partial(_linear, x, w) for w in weights]
            yield Case(f"matmul {name} T={tokens}", ours, num_bytes, flops)
            if name.endswith(ENDS):
                summed: list[Callable[[], None]] = [
                    partial(summed_matmul, x, w, None, out, NUM_SEGMENTS, work) for w in weights
                ]
                yield Case(f"summed_matmul {name} T={tokens}", summed, num_bytes, flops)
            yield Case(f"F.linear {name} T={tokens}", theirs, num_bytes, flops)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> None:
    F.linear(x, weight)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
