"""Matrix products into memory that is there already, as captured graphs need them.

Shape legend: T tokens, I inputs, O outputs, F inner width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.compute.kernels.matmul import matmul
from services.compute.kernels.matvec import matvec
from services.compute.kernels.silu_mul import silu_mul
from services.compute.kernels.skinny_matmul import skinny_gate_up_silu, skinny_matmul
from services.compute.kernels.skinny_matmul_config import MAX_TOKENS, SkinnyWork
from services.compute.layers.weighted_layers import Linear


class Product(Protocol):
    """How a device multiplies; one object for all layers."""

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor, /) -> None:
        """out = x W^T + b; `out` may be of a wider dtype than x."""
        ...

    def gate_up_silu(
        self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor, /
    ) -> None:
        """silu(gate) * up; `wide` holds both in between where they are separate launches."""
        ...


@dataclass(frozen=True, slots=True)
class CublasProduct:
    """The library's product, whose summation order changes with the number of rows.

    With `pdl` the launch of SiLU is a dependent one (see kernels/launch.py).
    """

    pdl: bool = False

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        weight_IO = linear.weight_OI.t()
        if linear.bias_O is not None:
            torch.addmm(linear.bias_O, x_TI, weight_IO, out=out_TO)
        elif out_TO.dtype is x_TI.dtype:
            torch.mm(x_TI, weight_IO, out=out_TO)
        else:
            torch.mm(x_TI, weight_IO, out_dtype=out_TO.dtype, out=out_TO)

    def gate_up_silu(self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor) -> None:
        self(x_TI, linear, wide_TF2)
        silu_mul(wide_TF2, out_TF, pdl=self.pdl)


class InvariantProduct:
    """A `Product` with one tiling and one order of summation for every number of rows."""

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        matmul(x_TI, linear.weight_OI, linear.bias_O, out_TO)

    def gate_up_silu(self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor) -> None:
        self(x_TI, linear, wide_TF2)
        silu_mul(wide_TF2, out_TF)


MIN_OUTPUTS = 512
"""Smaller weights are not worth a kernel of their own."""


def suits(num_tokens: int, num_out: int, num_in: int) -> bool:
    """Whether skinny_matmul is faster than cuBLAS for weights of 16 bits.

    On an H200 at 16, 32 and 64 rows it was, by up to a quarter, or as fast, for all linear maps of
    an 8B and a 1B model. So was skinny_gate_up_silu: at 64 rows 59 us against 67 and 19 against 22.
    """
    return 2 <= num_tokens <= MAX_TOKENS and num_in % 64 == 0 and num_out >= MIN_OUTPUTS


class SkinnyProduct:
    """A `Product`: matvec for one row, skinny_matmul where it suits, else cuBLAS.

    With `pdl` launches of its own kernels are programmatic dependent ones.
    """

    def __init__(self, work: SkinnyWork, pdl: bool = False) -> None:
        self._work = work
        self._pdl = pdl
        self._cublas = CublasProduct(pdl)

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        """Launches depend on shapes and dtypes alone, as captured graphs need."""
        num_tokens, (num_out, num_in) = x_TI.shape[0], linear.weight_OI.shape
        if num_tokens == 1:
            matvec(x_TI, linear.weight_OI, linear.bias_O, out_TO, pdl=self._pdl)
        elif x_TI.dtype != torch.float32 and suits(num_tokens, num_out, num_in):
            skinny_matmul(x_TI, linear.weight_OI, linear.bias_O, out_TO, self._work, pdl=self._pdl)
        else:
            self._cublas(x_TI, linear, out_TO)

    def gate_up_silu(self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor) -> None:
        num_tokens, (num_rows, num_in) = x_TI.shape[0], linear.weight_OI.shape
        fits = x_TI.dtype != torch.float32 and linear.bias_O is None
        if fits and suits(num_tokens, num_rows, num_in):
            skinny_gate_up_silu(x_TI, linear.weight_OI, out_TF, pdl=self._pdl)
        else:
            self._cublas.gate_up_silu(x_TI, linear, wide_TF2, out_TF)
