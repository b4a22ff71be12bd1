"""Products with packed weights on a GPU, whichever kernel is fastest for the number of rows.

Shape legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.linear.hopper_int4 import hopper_int4
from services.compute.kernels.linear.hopper_int4_config import (
    MAX_MEASURED_ROWS,
    Int4Work,
    int4_config,
    int4_options,
    suits,
)
from services.compute.kernels.linear.int4_matvec import int4_matvec, int4_row_config, walks_over
from services.compute.kernels.linear.integer_matvec import integer_matvec, integer_row_config
from services.compute.kernels.linear.matvec import (
    gate_up,
    has_scale_a_row,
    matvec,
    norm_gate_up,
    norm_matvec,
)
from services.compute.kernels.linear.packed_matmul import (
    PackedConfig,
    packed_matmul,
    packed_options,
)
from services.compute.kernels.linear.packed_matvec import PackedRowConfig, packed_matvec
from services.compute.kernels.linear.quantized_matmul import quantized_matmul
from services.compute.kernels.linear.quantized_matmul_config import (
    fits_device,
    quantized_options,
    row_form,
)
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.unpack import unpack
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm
from services.compute.layers.parts import Activation
from services.compute.layers.products import FusedProduct, Product
from services.compute.layers.weighted_layers import AnyLinear, Linear, QuantizedLinear
from services.compute.quantization.packed import Packed

MAX_PACKED_ROWS = 128
"""More rows that are not quantized are multiplied with the weight unpacked into memory: it is
written and read once more, and the library's product is the faster one."""

MAX_PLANES_ROWS = 512
"""Of rows in 16 bits: beyond, twice the products take longer than unpacking the weight does."""

MAX_ROWS_BESIDE_DENSE = 64
"""More of them are multiplied with the weight as it is, where it is kept; and so are two rows and
more for which there is no such product."""

MAX_INT4_ROWS = 512
"""Of rows as they are that Hopper multiplies with codes of 4 bits it decodes: more of them are
faster with the weight unpacked."""

MAX_INT4_ROWS_BESIDE_DENSE = 160
"""More of them are faster by the library with the weight as it is."""

MIN_LIBRARY_ROWS = 129
"""Of rows in FP8, from which on the library's product is faster than quantized_matmul."""

MIN_LIBRARY_ROWS_BY_GROUP = 16
"""With scales by groups, where the library has a kernel of its own; a multiple of 4."""

ROW_LIMITS = (
    max(MAX_PLANES_ROWS, MAX_INT4_ROWS),
    MAX_INT4_ROWS_BESIDE_DENSE,
    MAX_ROWS_BESIDE_DENSE,
    1,
)
"""Up to so many rows products want their rows in another form than above."""

INVARIANT = PackedConfig(block_tokens=64, block_out=64)


@dataclass(frozen=True, slots=True)
class RowOfNumbers:
    """One row in 16 bits times FP8 with a scale a row; as a `FusedProduct` with its neighbours."""

    pdl: bool

    def suits(self, num_tokens: int, linear: QuantizedLinear) -> bool:
        return num_tokens == 1 and has_scale_a_row(linear.weight)

    def __call__(self, x_TI: Tensor, linear: QuantizedLinear, out_TO: Tensor) -> None:
        matvec(x_TI, linear.weight, linear.bias_O, out_TO, pdl=self.pdl)

    def can_gate(self, num_tokens: int, linear: QuantizedLinear) -> bool:
        return linear.bias_O is None and self.suits(num_tokens, linear)

    def gated(
        self, x_TI: Tensor, linear: QuantizedLinear, activation: Activation, out_TF: Tensor
    ) -> None:
        gate_up(x_TI, linear.weight, out_TF, activation, pdl=self.pdl)

    def can_norm(self, num_tokens: int, linear: QuantizedLinear, norms_behind: bool) -> bool:
        return not norms_behind and self.suits(num_tokens, linear)  # as of weights of 16 bits

    def normed(self, normed: NormedInput, linear: QuantizedLinear, out_TO: Tensor) -> None:
        norm_matvec(normed, linear.weight, linear.bias_O, out_TO, pdl=self.pdl)

    def normed_gated(
        self, normed: NormedInput, linear: QuantizedLinear, activation: Activation, out_TF: Tensor
    ) -> None:
        norm_gate_up(normed, linear.weight, out_TF, activation, pdl=self.pdl)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWork:
    """What launches of products with packed weights have in common."""

    skinny: SkinnyWork
    scratch: Tensor  # for a weight that is unpacked; has room for the largest
    int4: Int4Work | None = None  # where Hopper's kernel runs


class QuantizedProduct:
    """A `Product` of packed weights, and its `FusedProduct`: one row's, or the `plain` product's
    where the weight is kept as it is, too."""

    def __init__(
        self,
        plain: Product[Linear],
        work: PackedWork,
        row: RowOfNumbers | None,
        *,
        pdl: bool,
        choices: Choices | None = None,
    ) -> None:
        """With many rows weights are unpacked for the `plain` product. Without `row`, which is for
        one row, a row's result does not depend on the number of rows."""
        self._plain = plain
        self._work = work
        self._invariant = row is None
        self._pdl = pdl
        self._choices = choices or Choices()
        self._row = row
        self._takes_quantized = not self._invariant and fits_device(work.scratch.device)

    @property
    def fused(self) -> FusedProduct[QuantizedLinear] | None:
        return None if self._row is None else self

    def can_gate(self, num_tokens: int, linear: QuantizedLinear) -> bool:
        fused, dense_OI = self._plain.fused, linear.dense_OI
        if num_tokens > 1 and dense_OI is not None and fused is not None:
            takes_codes = self.row_form(num_tokens, linear) is not None
            takes_codes |= self._takes_int4(num_tokens, linear)
            return not takes_codes and fused.can_gate(num_tokens, Linear(dense_OI, linear.bias_O))
        return self._row is not None and self._row.can_gate(num_tokens, linear)

    def gated(
        self, x_TI: Tensor, linear: QuantizedLinear, activation: Activation, out_TF: Tensor
    ) -> None:
        if len(x_TI) == 1:
            assert self._row is not None
            self._row.gated(x_TI, linear, activation, out_TF)
        else:
            assert self._plain.fused is not None and linear.dense_OI is not None
            self._plain.fused.gated(x_TI, Linear(linear.dense_OI), activation, out_TF)

    def can_norm(self, num_tokens: int, linear: QuantizedLinear, norms_behind: bool) -> bool:
        return self._row is not None and self._row.can_norm(num_tokens, linear, norms_behind)

    def normed(self, normed: NormedInput, linear: QuantizedLinear, out_TO: Tensor) -> None:
        assert self._row is not None
        self._row.normed(normed, linear, out_TO)

    def normed_gated(
        self, normed: NormedInput, linear: QuantizedLinear, activation: Activation, out_TF: Tensor
    ) -> None:
        assert self._row is not None
        self._row.normed_gated(normed, linear, activation, out_TF)

    def row_form(self, num_tokens: int, linear: QuantizedLinear) -> RowForm | None:
        if not self._takes_quantized or self._takes_int4(num_tokens, linear):
            return None
        form = row_form(linear.weight, num_tokens)
        most = MAX_PLANES_ROWS if linear.dense_OI is None else MAX_ROWS_BESIDE_DENSE
        too_many = form is not None and form.planes > 1 and num_tokens > most
        return None if too_many else form

    def _takes_int4(self, num_tokens: int, linear: QuantizedLinear) -> bool:
        most = MAX_INT4_ROWS if linear.dense_OI is None else MAX_INT4_ROWS_BESIDE_DENSE
        return self._work.int4 is not None and 1 < num_tokens <= most and takes_int4(linear)

    def __call__(
        self, x_TI: Tensor | QuantizedRows, linear: QuantizedLinear, out_TO: Tensor
    ) -> None:
        if isinstance(x_TI, QuantizedRows):
            self._of_codes(x_TI, linear, out_TO)
        else:
            self._of_numbers(x_TI, linear, out_TO)

    def _of_codes(self, rows: QuantizedRows, linear: QuantizedLinear, out_TO: Tensor) -> None:
        weight, bias_O = linear.weight, linear.bias_O
        num_tokens = rows.shape[0]
        if num_tokens == 1:
            if walks_over(weight):
                walk = int4_row_config(weight.num_inputs)
                int4_matvec(rows, weight, bias_O, out_TO, walk, pdl=self._pdl)
            else:
                row_config = integer_row_config(weight)
                integer_matvec(rows, weight, bias_O, out_TO, row_config, pdl=self._pdl)
        elif _suits_library(rows, weight.shape[0], out_TO.dtype):
            _scaled_mm(rows, linear, out_TO)
        else:
            self._choices.launch(
                quantized_options(rows.form, weight, num_tokens),
                partial(
                    quantized_matmul, rows, weight, bias_O, out_TO, self._work.skinny, pdl=self._pdl
                ),
            )

    def _of_numbers(self, x_TI: Tensor, linear: QuantizedLinear, out_TO: Tensor) -> None:
        weight, num_tokens = linear.weight, len(x_TI)
        work, pdl = self._work.int4, self._pdl
        if work is not None and self._takes_int4(num_tokens, linear):
            launch = partial(hopper_int4, x_TI, weight, linear.bias_O, out_TO, work, pdl=pdl)
            if num_tokens <= MAX_MEASURED_ROWS:
                options = int4_options(weight, num_tokens, x_TI.dtype, work.num_sms)
                self._choices.launch(options, launch)
            else:
                launch(int4_config(num_tokens, weight.shape[0], work.num_sms))
            return
        if linear.dense_OI is not None and num_tokens > 1:
            self._plain(x_TI, Linear(linear.dense_OI, linear.bias_O), out_TO)
            return
        if self._row is not None and self._row.suits(num_tokens, linear):
            self._row(x_TI, linear, out_TO)
            return
        if num_tokens == 1 and not self._invariant:
            x_TI, row_config = _ordered(x_TI, weight), PackedRowConfig()
            packed_matvec(x_TI, weight, linear.bias_O, out_TO, row_config, pdl=self._pdl)
        elif num_tokens <= MAX_PACKED_ROWS or self._invariant:
            launch = partial(self._decoded, x_TI, linear, out_TO)
            if self._invariant:
                launch(INVARIANT)
            else:
                self._choices.launch(packed_options(num_tokens, weight, x_TI.dtype), launch)
        else:
            num_out, num_in = weight.shape
            weight_OI = self._work.scratch[: num_out * num_in].view(num_out, num_in)
            unpack(weight, weight_OI)
            self._plain(_ordered(x_TI, weight), Linear(weight_OI, linear.bias_O), out_TO)

    def _decoded(
        self, x_TI: Tensor, linear: QuantizedLinear, out_TO: Tensor, config: PackedConfig
    ) -> None:
        # ordered here, so that launches that are noted keep no copies of their rows
        weight, x_TI = linear.weight, _ordered(x_TI, linear.weight)
        packed_matmul(x_TI, weight, linear.bias_O, out_TO, self._work.skinny, config, pdl=self._pdl)


def takes_int4(linear: AnyLinear) -> bool:
    """Whether Hopper's kernel for 4 bits has a product with this map."""
    if not isinstance(linear, QuantizedLinear):
        return False
    return linear.has_whole_zeros and suits(linear.weight)


def _ordered(x_TI: Tensor, weight: Packed) -> Tensor:
    """Inputs as the weight's columns are."""
    return x_TI if weight.order_I is None else x_TI[:, weight.order_I]


def _suits_library(rows: QuantizedRows, num_out: int, dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` has such a product, and is the faster one."""
    num_tokens = rows.shape[0]
    on_gpu = rows.codes_TPI.is_cuda
    if rows.form.kind != "fp8" or dtype != torch.bfloat16 or num_out % 16 or not on_gpu:
        return False
    if rows.form.by_group:
        is_even = num_tokens >= MIN_LIBRARY_ROWS_BY_GROUP and num_tokens % 4 == 0
        return is_even and _has_products_by_group(rows.codes_TPI.device)
    return num_tokens >= MIN_LIBRARY_ROWS


@cache
def _has_products_by_group(device: torch.device) -> bool:
    """cuBLAS has them since CUDA 12.9, and for Hopper alone."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    return version >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def _scaled_mm(rows: QuantizedRows, linear: QuantizedLinear, out_TO: Tensor) -> None:
    """The library's product; sums go on in float32 after some inputs, as in quantized_matmul. With
    a bias the result is rounded once more."""
    weight = linear.weight
    torch._scaled_mm(
        rows.codes_TPI[:, 0],
        weight.codes_OB.t(),
        rows.scales_TG,
        weight.scales_OG.t(),
        out_dtype=out_TO.dtype,
        use_fast_accum=False,
        out=out_TO,
    )
    if linear.bias_O is not None:
        out_TO.add_(linear.bias_O)
