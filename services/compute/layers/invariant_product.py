"""Matrix products whose rows come out the same whatever stands beside them."""

from __future__ import annotations

from torch import Tensor

from services.compute.kernels.matmul import matmul
from services.compute.kernels.silu_mul import silu_mul
from services.compute.layers.linear import Linear


class InvariantProduct:
    """A `Product` with one tiling and one order of summation for every number of rows."""

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        """Any shape and dtype."""
        matmul(x_TI, linear.weight_OI, linear.bias_O, out_TO)

    def gate_up_silu(self, x_TI: Tensor, linear: Linear, wide_TF2: Tensor, out_TF: Tensor) -> None:
        """Two launches."""
        self(x_TI, linear, wide_TF2)
        silu_mul(wide_TF2, out_TF)
