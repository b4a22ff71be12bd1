"""Matrix products of few rows by kernels of our own, where those are faster than the library."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.matvec.kernel import matvec
from services.compute.kernels.skinny_matmul.config import MAX_TOKENS
from services.compute.kernels.skinny_matmul.kernel import skinny_matmul
from services.compute.kernels.skinny_matmul.work import SkinnyWork
from services.compute.layers.linear import Linear
from services.compute.layers.product import cublas_product


def suits(num_tokens: int, num_out: int, num_in: int) -> bool:
    """Whether skinny_matmul serves weights of 16 bits: expected to be faster, not yet measured."""
    return 2 <= num_tokens <= MAX_TOKENS and num_in % 64 == 0 and num_out >= 512


class SkinnyProduct:
    """A `Product`: matvec for one row, skinny_matmul where it suits, else cuBLAS."""

    def __init__(self, work: SkinnyWork) -> None:
        self._work = work

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        """Launches depend on shapes and dtypes alone, as captured graphs need."""
        num_tokens, (num_out, num_in) = x_TI.shape[0], linear.weight_OI.shape
        if num_tokens == 1:
            matvec(x_TI, linear.weight_OI, linear.bias_O, out_TO)
        elif x_TI.dtype != torch.float32 and suits(num_tokens, num_out, num_in):
            skinny_matmul(x_TI, linear.weight_OI, linear.bias_O, out_TO, self._work)
        else:
            cublas_product(x_TI, linear, out_TO)
