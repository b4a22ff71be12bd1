"""The layers that hold weights: embedding, norm and linear maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row v of the table, times the scale, is the vector of token v."""

    weight_VE: Tensor
    scale: float = 1.0

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Look up [T] ids, all below V (the runner has checked them)."""
        x_TE = F.embedding(tokens_T, self.weight_VE)
        return x_TE if self.scale == 1.0 else x_TE.mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm, or layer norm: x, less its mean, over its root mean square, times the weight.

    Mean and division are float32. With `round_first` the GPU's kernels round the quotient to x's
    dtype before they multiply, as Llama's code does, and without it once, at the end, as that of
    Gemma, OLMo 2 and Cohere does; in plain torch it is always once. The weight may be float32.
    """

    weight_E: Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias_E: Tensor | None = None
    round_first: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.weight_E.dtype
        if self.kind == "rms" and dtype == x.dtype:
            return F.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        if self.kind == "layer":
            normed = F.layer_norm(
                x.to(dtype), self.weight_E.shape, self.weight_E, self.bias_E, self.eps
            )
        else:
            normed = F.rms_norm(x.to(dtype), self.weight_E.shape, self.weight_E, self.eps)
        return normed.to(x.dtype)


LinearMap: TypeAlias = "Callable[[Tensor], Tensor]"
"""y = x W^T + b for x [T, I]."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The map as it stands; several maps of one input are one by stacking their rows."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


EXPECTED_ROWS = 16
"""The number of rows that the order is chosen for; other numbers lose nothing measurable."""


ROW_STEPS = ((1, 1), (32, 4), (64, 8), (128, 16), (512, 32))
"""Numbers of rows that products are made with: up to this, in steps of this; 64 beyond. oneDNN
makes kernels for each that occurs: 240 prompts of all lengths took 16 s with every number and 12
with steps. Up to six rows take as long as one."""


def padded_rows(num_rows: int) -> int:
    step = next((step for limit, step in ROW_STEPS if num_rows <= limit), 64)
    return -(-num_rows // step) * step


class PackedLinear:
    """y = x W^T + b on the CPU, the weight in the order in which oneDNN's kernels read it.

    torch's inductor does the same to compiled models. Against F.linear, which reorders at every
    call: 1.2 to 2 times as fast in bf16 with up to 64 rows, twice in float32 with any number
    (benchmarks/results/cpu_kernels.md). The weight in its plain order is not kept.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, EXPECTED_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_rows = len(x_TI)
        padding = padded_rows(num_rows) - num_rows
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(
            F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI,
            *(self._packed, self._bias_O, "none", [], ""),
        )
        return out_TO[:num_rows] if padding else out_TO


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
