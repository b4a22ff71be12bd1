"""Linear maps on the CPU in bfloat16, whose products of few rows are compiled kernels.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.cpu.products import (
    BFLOAT16,
    multiply_codes,
    multiply_numbers,
    product,
)
from services.compute.kernels.cpu.team import num_threads, team_of
from services.compute.layers.cpu_linear import FEW_ROWS, CpuLinears, Int8Linear
from services.compute.layers.weighted_layers import LinearMap
from services.compute.quantization.packed import Packed, Weight


class FewRows:
    """Products of few rows with numbers in bfloat16, or with codes of 8 bits and their scales."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, scales_O: Tensor | None = None
    ) -> None:
        self._num_out, num_in = weight_OI.shape
        self._bias_O = bias_O
        scales_O = None if scales_O is None else scales_O.float()
        wide_x, team = torch.empty(FEW_ROWS, num_in), team_of(num_threads())
        addresses = wide_x.data_ptr(), weight_OI.data_ptr(), data_ptr(scales_O)
        self._work = np.array((*addresses, num_in, self._num_out, team.ctypes.data, 0, 0))
        self._work_ptr = self._work.ctypes.data
        self._multiply = (multiply_numbers if scales_O is None else multiply_codes).address
        self._kept = weight_OI, scales_O, wide_x, team  # whose addresses those are

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI.contiguous()
        num_rows = len(x_TI)
        out_TO = x_TI.new_empty(num_rows, self._num_out)
        where = self._work_ptr, x_TI.data_ptr(), out_TO.data_ptr()
        product(*where, num_rows, self._multiply, BFLOAT16)
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)


def data_ptr(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class ByRows:
    """One map of few rows, another of more."""

    def __init__(self, few: LinearMap, more: LinearMap, most_few: int) -> None:
        self._few, self._more, self._most_few = few, more, most_few

    def __call__(self, x_TI: Tensor) -> Tensor:
        return (self._few if len(x_TI) <= self._most_few else self._more)(x_TI)


class CompiledLinears(CpuLinears):
    """The maps that plain torch has, and beside them those of few rows."""

    def __init__(self, dtype: torch.dtype, keep_dense: bool) -> None:
        super().__init__(dtype, keep_dense)
        # where one thread would multiply, and all others wait for it, torch does
        self._compiles = dtype == torch.bfloat16 and num_threads() == torch.get_num_threads()

    def __call__(self, weight: Weight, bias_O: Tensor | None) -> LinearMap:
        linear = super().__call__(weight, bias_O)
        if not self._compiles:
            return linear
        if isinstance(linear, Int8Linear):
            few = FewRows(linear.codes_OI, bias_O, linear.scales_O)
            return ByRows(few, linear, FEW_ROWS)
        if isinstance(weight, Packed) or not self._keep_dense:
            return linear
        return ByRows(FewRows(weight.contiguous(), bias_O), linear, 1)
