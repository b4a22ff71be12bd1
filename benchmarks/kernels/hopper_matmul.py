"""Gates and ups of more than 64 rows with SiLU, bf16, on Hopper: one launch beside cuBLAS's and the
activation's.

Expected on an H100: up to 288 rows the time that the weights take to be read, 80 us of 8B and 25 of
1B; at 2,048 rows and more 700 TFLOP/s, less what the last round leaves idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import cold_weights, draw
from services.compute.kernels.linear.hopper_matmul import hopper_gate_up
from services.compute.kernels.linear.hopper_matmul_config import HopperTiling
from services.compute.kernels.rows.activations import act_mul

WIDTHS = {
    "8B": (4096, 14336),
    "1B": (2048, 8192),
    "Qwen2.5-3B": (2048, 11008),
    "Qwen2.5-7B": (3584, 18944),
    "70B on four": (8192, 7168),
    "70B on two": (8192, 14336),
}
"""Inputs, and gates of a GPU."""

ROW_COUNTS = (80, 128, 160, 192, 256, 288, 320, 384, 512, 768, 1024, 2048, 4096, 8192)


def cases() -> Iterator[Case]:
    """The two of each model at each number of rows."""
    tiling = HopperTiling.of(torch.device("cuda"))
    for name, (num_in, inner) in WIDTHS.items():
        weights = cold_weights(2 * inner, num_in)
        for num_rows in ROW_COUNTS:
            yield from _gated(f"{name} gate/up silu T={num_rows}", weights, num_rows, tiling)


def _gated(name: str, weights: list[Tensor], num_rows: int, tiling: HopperTiling) -> Iterator[Case]:
    num_out, num_in = weights[0].shape
    x = draw(num_rows, num_in)
    both = torch.empty(num_rows, num_out, device="cuda", dtype=x.dtype)
    out = torch.empty(num_rows, num_out // 2, device="cuda", dtype=x.dtype)

    def library(weight: Tensor) -> None:
        torch.mm(x, weight.t(), out=both)
        act_mul(both, out, "silu")

    def hopper(weight: Tensor) -> None:
        hopper_gate_up(x, weight, out, "silu", tiling)

    num_bytes = 2.0 * (num_out * num_in + num_rows * num_in + out.numel())
    flops = 2.0 * num_rows * num_out * num_in
    tile = tiling.tile(num_rows, num_out)
    for kind, call in (("cuBLAS", library), (f"{tile.main}+{tile.tail}", hopper)):
        yield Case(
            f"{name} {kind}", [partial(call, weight) for weight in weights], num_bytes, flops
        )
