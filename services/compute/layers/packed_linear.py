"""A linear map whose weight oneDNN has put in the order in which its CPU kernels read it.

torch's inductor does the same to compiled models. Against F.linear, which reorders at every call:
1.2 to 2 times as fast in bf16 with up to 64 rows, twice in float32 with any number
(benchmarks/results/cpu_kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPECTED_ROWS = 16
"""The number of rows that the order is chosen for; other numbers lose nothing measurable."""


class PackedLinear:
    """y = x W^T + b on the CPU; the weight in its plain order is not kept."""

    __slots__ = ("_bias_O", "_packed")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, EXPECTED_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Map [T, I] to [T, O]."""
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_TI, self._packed, self._bias_O, "none", [], ""
        )
        return out_TO


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch, on this processor, has packed kernels for the dtype."""
    if device.type != "cpu":
        return False
    try:
        probe = PackedLinear(torch.zeros(16, 16, dtype=dtype))
        probe(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # no such operator or no such instruction
        return False
    return True
