"""Products with packed weights on a GPU, whichever kernel is fastest for the number of rows.

Shape legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from services.compute.kernels.packed_matmul import PackedConfig, packed_config, packed_matmul
from services.compute.kernels.packed_matvec import PackedRowConfig, packed_matvec
from services.compute.kernels.skinny_matmul_config import SkinnyWork
from services.compute.kernels.unpack import unpack
from services.compute.layers.products import Product
from services.compute.layers.weighted_layers import Linear, QuantizedLinear

MAX_PACKED_ROWS = 128
"""More rows are multiplied with the weight unpacked into memory: it is written and read once more,
and the library's product is the faster one."""

INVARIANT = PackedConfig(block_tokens=64, block_out=64)


class QuantizedProduct:
    """A `Product` of packed weights.

    `invariant`: a row's result does not depend on the number of rows.
    """

    fused = None

    def __init__(
        self,
        plain: Product[Linear],
        work: SkinnyWork,
        scratch: Tensor,
        *,
        invariant: bool,
        pdl: bool,
    ) -> None:
        """With many rows weights are unpacked into `scratch`, which has room for the largest, for
        the `plain` product."""
        self._plain = plain
        self._work = work
        self._scratch = scratch
        self._invariant = invariant
        self._pdl = pdl

    def __call__(self, x_TI: Tensor, linear: QuantizedLinear, out_TO: Tensor) -> None:
        weight, num_tokens = linear.weight, len(x_TI)
        if weight.order_I is not None:
            x_TI = x_TI[:, weight.order_I]
        if num_tokens == 1 and not self._invariant:
            packed_matvec(x_TI, weight, linear.bias_O, out_TO, PackedRowConfig(), pdl=self._pdl)
        elif num_tokens <= MAX_PACKED_ROWS or self._invariant:
            config = INVARIANT if self._invariant else packed_config(num_tokens, *weight.shape)
            packed_matmul(x_TI, weight, linear.bias_O, out_TO, self._work, config, pdl=self._pdl)
        else:
            num_out, num_in = weight.shape
            weight_OI = self._scratch[: num_out * num_in].view(num_out, num_in)
            unpack(weight, weight_OI)
            self._plain(x_TI, Linear(weight_OI, linear.bias_O), out_TO)
