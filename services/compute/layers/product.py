"""Matrix products into memory that is there already, as captured graphs need them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.compute.layers.linear import Linear


class Product(Protocol):
    """out = x W^T + b for x [T, I]; `out` may be of a wider dtype than x."""

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor, /) -> None: ...


def cublas_product(x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
    """The library's product, whose summation order changes with the number of rows."""
    weight_IO = linear.weight_OI.t()
    if linear.bias_O is not None:
        torch.addmm(linear.bias_O, x_TI, weight_IO, out=out_TO)
    elif out_TO.dtype is x_TI.dtype:
        torch.mm(x_TI, weight_IO, out=out_TO)
    else:
        torch.mm(x_TI, weight_IO, out_dtype=out_TO.dtype, out=out_TO)
