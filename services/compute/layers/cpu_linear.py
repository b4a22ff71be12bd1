"""Linear maps on the CPU, by the kernels of oneDNN and of ATen that are fastest for their rows.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.weighted_layers import Linear, LinearMap
from services.compute.quantization.at_load import rounded_to_int8
from services.compute.quantization.packed import Packed, Weight

EXPECTED_ROWS = 16
"""The number of rows that the order is chosen for; other numbers lose nothing measurable."""


ROW_STEPS = ((1, 1), (32, 4), (64, 8), (128, 16), (512, 32))
"""Numbers of rows that products are made with: up to this, in steps of this; 64 beyond. oneDNN
makes kernels for each that occurs: 240 prompts of all lengths took 16 s with every number and 12
with steps. Up to six rows take as long as one."""


def padded_rows(num_rows: int) -> int:
    step = next((step for limit, step in ROW_STEPS if num_rows <= limit), 64)
    return -(-num_rows // step) * step


class ReorderedLinear:
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


FEW_ROWS = 4
"""Up to which codes of 8 bits are faster than bfloat16: twice at one row, with three matrices of a
100 M model (110 us against 223, 74 against 166, 81 against 139), still at four (177 against 239).
With eight they are slower, as ATen's kernel reads them once for each row."""


class Int8Linear:
    """y = x W^T + b in bfloat16 of codes of 8 bits, with a scale for each row of the weight.

    Where memory is plenty the weight is kept in bfloat16, too, for more than `FEW_ROWS` rows;
    elsewhere it is made for each call.
    """

    def __init__(self, weight: Packed, bias_O: Tensor | None, keep_dense: bool) -> None:
        rounded = rounded_to_int8(weight)
        self._codes_OI, self._bias_O = rounded.codes_OB, bias_O
        self._scales_O = rounded.scales_OG.flatten()
        self._dense: ReorderedLinear | None = None
        if keep_dense:
            self._dense = ReorderedLinear(rounded.dense(torch.bfloat16), bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if len(x_TI) > FEW_ROWS:
            if self._dense is not None:
                return self._dense(x_TI)
            weight_OI = self._codes_OI.to(x_TI.dtype).mul_(self._scales_O[:, None])
            return F.linear(x_TI, weight_OI, self._bias_O)
        out_TO: Tensor = torch.ops.aten._weight_int8pack_mm(x_TI, self._codes_OI, self._scales_O)
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)


class CpuLinears:
    """Makes the maps of one model.

    In bfloat16, weights of all quantized formats get codes of 8 bits with a scale for each row. In
    other dtypes they are multiplied with as the numbers that they stand for.
    """

    def __init__(self, dtype: torch.dtype, keep_dense: bool = True) -> None:
        """`keep_dense`: whether memory is plenty, as `Int8Linear` says."""
        self._dtype = dtype
        self._keep_dense = keep_dense
        self._reorders = works(ReorderedLinear, dtype)
        self._has_codes = dtype == torch.bfloat16 and works(_int8, dtype)

    def __call__(self, weight: Weight, bias_O: Tensor | None) -> LinearMap:
        if isinstance(weight, Packed):
            if self._has_codes:
                return Int8Linear(weight, bias_O, self._keep_dense and self._reorders)
            weight = weight.dense(self._dtype)
        return ReorderedLinear(weight, bias_O) if self._reorders else Linear(weight, bias_O)


def works(make: Callable[[Tensor], LinearMap], dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, has the kernels for the dtype."""
    try:
        make(torch.ones(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # no such operator or no such instruction
        return False
    return True


def _int8(weight_OI: Tensor) -> Int8Linear:
    codes = weight_OI.to(torch.int8)
    return Int8Linear(Packed("int8", codes, torch.ones(len(codes), 1)), None, keep_dense=False)
