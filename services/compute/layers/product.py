"""Matrix products into memory that is there already, as captured graphs need them.

Shape legend: T tokens, I inputs, O outputs, F inner width of the MLP.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.compute.kernels.silu_mul import silu_mul
from services.compute.layers.linear import Linear


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


class CublasProduct:
    """The library's product, whose summation order changes with the number of rows.

    With `pdl` the launch of SiLU is a dependent one (see kernels/dependent_launch.py).
    """

    def __init__(self, pdl: bool = False) -> None:
        self._pdl = pdl

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        """Any shape and dtype."""
        weight_IO = linear.weight_OI.t()
        if linear.bias_O is not None:
            torch.addmm(linear.bias_O, x_TI, weight_IO, out=out_TO)
        elif out_TO.dtype is x_TI.dtype:
            torch.mm(x_TI, weight_IO, out=out_TO)
        else:
            torch.mm(x_TI, weight_IO, out_dtype=out_TO.dtype, out=out_TO)

    def gate_up_silu(self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor) -> None:
        """Two launches."""
        self(x_TI, linear, wide_TF2)
        silu_mul(wide_TF2, out_TF, pdl=self._pdl)
