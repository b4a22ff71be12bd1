"""Linear maps on the CPU whose products of few rows with codes are compiled kernels.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.cpu.language import LIKE, num_threads
from services.compute.kernels.cpu.products import int8_product, int8_product_in_threads
from services.compute.layers.cpu_linear import CpuLinears, Int8Linear
from services.compute.layers.weighted_layers import LinearMap
from services.compute.quantization.packed import Packed

FEW_ROWS = 4


class CompiledInt8Linear(Int8Linear):
    """The same, by a kernel that reads codes as fast as memory gives them."""

    def __init__(self, weight: Packed, bias_O: Tensor | None, keep_dense: bool) -> None:
        super().__init__(weight, bias_O, keep_dense)
        self._num_out, self._num_in = self._codes_OI.shape
        self._codes_ptr = self._codes_OI.data_ptr()
        self._wide_scales_O = self._scales_O.float()
        self._scales_ptr = self._wide_scales_O.data_ptr()
        self._num_threads = num_threads()
        self._has_threads = self._num_threads == torch.get_num_threads()

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_rows = len(x_TI)
        if num_rows > FEW_ROWS or not self._has_threads:
            return super().__call__(x_TI)
        x_TI = x_TI.contiguous()
        out_TO = x_TI.new_empty(num_rows, self._num_out)
        where = x_TI.data_ptr(), self._codes_ptr, self._scales_ptr, out_TO.data_ptr()
        sizes, like = (num_rows, self._num_in, self._num_out), LIKE[x_TI.dtype]
        if self._num_threads == 1:
            int8_product(*where, *sizes, like)
        else:
            int8_product_in_threads(*where, *sizes, self._num_threads, like)
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)


class CompiledLinears(CpuLinears):
    def _int8(self, weight: Packed, bias_O: Tensor | None) -> LinearMap:
        return CompiledInt8Linear(weight, bias_O, self._keep_dense and self._reorders)
