"""Matrix products whose rows come out the same whatever stands beside them."""

from __future__ import annotations

from torch import Tensor

from services.compute.kernels.matmul.kernel import matmul
from services.compute.layers.linear import Linear


def invariant_product(x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
    """A product with one tiling and one order of summation for every number of rows."""
    matmul(x_TI, linear.weight_OI, linear.bias_O, out_TO)
