"""Linear maps on the CPU in bfloat16, whose products of few rows are compiled kernels.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.cpu.language import LIKE, num_threads
from services.compute.kernels.cpu.products import CODE, product, product_in_threads
from services.compute.layers.cpu_linear import FEW_ROWS, CpuLinears, Int8Linear
from services.compute.layers.weighted_layers import LinearMap
from services.compute.quantization.packed import Packed, Weight

BFLOAT16 = LIKE[torch.bfloat16]


class FewRows:
    """Products of few rows with numbers in bfloat16, or with codes of 8 bits and their scales."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, scales_O: Tensor | None = None
    ) -> None:
        self._num_out, self._num_in = weight_OI.shape
        self._weight_OI, self._bias_O = weight_OI, bias_O
        self._scales_O = None if scales_O is None else scales_O.float()
        self._kind = BFLOAT16 if self._scales_O is None else CODE
        self._num_threads = num_threads()

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI.contiguous()
        num_rows = len(x_TI)
        out_TO = x_TI.new_empty(num_rows, self._num_out)
        scales_ptr = 0 if self._scales_O is None else self._scales_O.data_ptr()
        where = x_TI.data_ptr(), self._weight_OI.data_ptr(), scales_ptr, out_TO.data_ptr()
        sizes = num_rows, self._num_in, self._num_out
        if self._num_threads == 1:
            product(*where, *sizes, self._kind, BFLOAT16)
        else:
            product_in_threads(*where, *sizes, self._num_threads, self._kind, BFLOAT16)
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)


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
