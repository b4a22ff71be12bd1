"""Linear maps on the CPU, by the kernels of oneDNN and of ATen that are fastest for their rows.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.weighted_layers import Linear, LinearMap
from services.compute.layers.widened import WidenedLinear, has_bf16
from services.compute.quantization.at_load import rounded_to_int8
from services.compute.quantization.packed import Packed, Weight, unhalved

EXPECTED_ROWS = 16
"""The number of rows that the order is chosen for; other numbers lose nothing measurable."""


ROW_STEPS = ((1, 1), (32, 4), (64, 8), (128, 16), (512, 32))
"""Numbers of rows that products are made with: up to this, in steps of this; 64 beyond. oneDNN
makes kernels for each that occurs: 240 prompts of all lengths took 16 s with every number and 12
with steps. Up to six rows take as long as one."""


def padded_rows(num_rows: int) -> int:
    step = next((step for limit, step in ROW_STEPS if num_rows <= limit), 64)
    return -(-num_rows // step) * step


class ReorderedLinear:
    """y = x W^T + b on the CPU, the weight in the order in which oneDNN's kernels read it.

    torch's inductor does the same to compiled models. Against F.linear, which reorders at every
    call: 1.2 to 2 times as fast in bf16 with up to 64 rows, twice in float32 with any number
    (benchmarks/results/cpu_kernels.md). The weight in its plain order is not kept.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, EXPECTED_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_rows = len(x_TI)
        padding = padded_rows(num_rows) - num_rows
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI,
            *(self._packed, self._bias_O, "none", [], ""),
        )
        return out_TO[:num_rows] if padding else out_TO


FEW_ROWS = 4
"""Up to which codes of 8 bits are faster than bfloat16: twice at one row, with three matrices of a
100 M model (110 us against 223, 74 against 166, 81 against 139), still at four (177 against 239).
With eight they are slower, as ATen's kernel reads them once for each row."""

INPUTS_TOGETHER = 16
"""ATen's kernel of 8 bits reads so many inputs at once, and beyond a row's end where they are no
multiple: it gives wrong numbers there, or ends the process."""


class Int8Linear:
    """y = x W^T + b in bfloat16 of codes of 8 bits, with a scale for each row of the weight.

    `many_rows` multiplies where there are more than `FEW_ROWS`.
    """

    def __init__(self, rounded: Packed, bias_O: Tensor | None, many_rows: LinearMap) -> None:
        self.codes_OI, self._bias_O = rounded.codes_OB, bias_O
        self.scales_O, self.many_rows = rounded.scales_OG.flatten(), many_rows

    def __call__(self, x_TI: Tensor) -> Tensor:
        if len(x_TI) > FEW_ROWS or x_TI.shape[1] % INPUTS_TOGETHER:
            return self.many_rows(x_TI)
        out_TO = torch._weight_int8pack_mm(x_TI, self.codes_OI, self.scales_O)
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)


FEW_ROWS_INT4 = 6
"""Up to which codes of 4 bits are faster than bfloat16: at one row 2.6 to 2.9 times, with matrices
of a 100 M model, at four 1.4 to 1.9 times; at eight they take 0.94 to 1.3 of its time."""

GROUP_SIZES = (256, 128, 64, 32)
"""That ATen's kernel of 4 bits has."""

ROWS_TOGETHER = 16
"""The rows of a weight of 4 bits are a multiple of this."""

ROWS_AT_ONCE = 1024
"""Rows that are packed at once: a multiple of 64, which ATen puts together where they are there."""


class Int4Linear:
    """y = x W^T + b in bfloat16 of codes of 4 bits, with scale and zero for each group.

    The codes are those of the checkpoint. `many_rows` multiplies by the same weight where there are
    more than `FEW_ROWS_INT4`; without it, the codes do.
    """

    def __init__(
        self,
        weight: Packed,
        bias_O: Tensor | None,
        many_rows: LinearMap | None = None,
    ) -> None:
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        parts = torch.split(weight.codes_OB, ROWS_AT_ONCE)  # as it takes 32 bits for each code
        self._codes = torch.cat([pack(unhalved(part).int(), 1) for part in parts])
        self._group_size = _group_size(weight)
        scales_OG = weight.scales_OG.float()
        # the kernel adds a number to (code - 8) * scale
        added_OG = torch.zeros_like(scales_OG)
        if weight.zeros_OG is not None:
            added_OG = weight.zeros_OG.float().mul_(scales_OG).neg_()
        both_OG2 = torch.stack((scales_OG, added_OG), dim=-1).bfloat16()
        repeats = weight.group_size // self._group_size
        both_GO2 = both_OG2.transpose(0, 1).repeat_interleave(repeats, dim=0)
        self._scales_GO2 = both_GO2.contiguous()
        self._order_I, self._bias_O, self._many_rows = weight.order_I, bias_O, many_rows

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._many_rows is not None and len(x_TI) > FEW_ROWS_INT4:
            return self._many_rows(x_TI)
        if self._order_I is not None:
            x_TI = x_TI.index_select(1, self._order_I)
        out_TO = torch._weight_int4pack_mm_for_cpu(
            x_TI, self._codes, self._group_size, self._scales_GO2
        )
        return out_TO if self._bias_O is None else out_TO.add_(self._bias_O)

    @staticmethod
    def takes(weight: Packed) -> bool:
        return (
            weight.kind == "int4"
            and not weight.shape[0] % ROWS_TOGETHER
            and not weight.group_size % GROUP_SIZES[-1]
        )


def _group_size(weight: Packed) -> int:
    """The largest of the kernel's that a group is a multiple of."""
    return next(size for size in GROUP_SIZES if not weight.group_size % size)


class CpuLinears:
    """Makes the maps of one model.

    In bfloat16, weights of 4 bits stay so, and those of all other quantized formats get codes of 8
    bits with a scale for each row. In other dtypes they are multiplied with as the numbers that
    they stand for.
    """

    def __init__(self, dtype: torch.dtype, keep_dense: bool = True) -> None:
        """`keep_dense`: whether memory is plenty for a second copy of weights, for many rows."""
        self._dtype = dtype
        self._keep_dense = keep_dense
        self._reorders = works(ReorderedLinear, dtype)
        self._widens = dtype == torch.bfloat16 and not has_bf16()
        self._has_int8 = dtype == torch.bfloat16 and works(_int8, dtype)
        # Without vectors, and in other dtypes, the kernel of 4 bits multiplies number by number: in
        # float32 it takes five times as long as F.linear at one row.
        has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        self._has_int4 = dtype == torch.bfloat16 and has_vectors and works(_int4, dtype)

    def __call__(
        self, weight: Weight, bias_O: Tensor | None, dense_OI: Tensor | None = None
    ) -> LinearMap:
        if not isinstance(weight, Packed):
            return self._dense(weight, bias_O)
        if self._has_int4 and Int4Linear.takes(weight):
            many_rows = None
            if self._keep_dense:
                many_rows = self._dense_of(weight, bias_O, dense_OI)
            return Int4Linear(weight, bias_O, many_rows)
        if self._has_int8:
            return self._of_bytes(rounded_to_int8(weight), bias_O)
        return self._dense_of(weight, bias_O, dense_OI)

    def summed(self, weight: Weight, bias_O: Tensor | None, num_inputs: int) -> LinearMap:
        return self(weight, bias_O)

    def router(self, weight_XE: Tensor, bias_X: Tensor | None) -> LinearMap:
        linear = Linear(weight_XE, None if bias_X is None else bias_X.float())
        return lambda x_TE: linear(x_TE.float())

    def experts(
        self, weights: Iterable[Weight], num_experts: int, bias_XO: Tensor | None
    ) -> tuple[LinearMap, ...]:
        biases: Sequence[Tensor | None] = [None] * num_experts if bias_XO is None else [*bias_XO]
        return tuple(map(self, weights, biases))

    def _dense_of(
        self, weight: Packed, bias_O: Tensor | None, dense_OI: Tensor | None
    ) -> LinearMap:
        return self._dense(weight.dense(self._dtype) if dense_OI is None else dense_OI, bias_O)

    def _dense(self, weight_OI: Tensor, bias_O: Tensor | None) -> LinearMap:
        if self._widens:
            return WidenedLinear(weight_OI, bias_O)
        return ReorderedLinear(weight_OI, bias_O) if self._reorders else Linear(weight_OI, bias_O)

    def _of_bytes(self, rounded: Packed, bias_O: Tensor | None) -> LinearMap:
        return Int8Linear(rounded, bias_O, self._many_rows_of_bytes(rounded, bias_O))

    def _many_rows_of_bytes(self, rounded: Packed, bias_O: Tensor | None) -> LinearMap:
        """Where memory is plenty, and the processor has products of them, of numbers in bfloat16;
        else they are made for each call."""
        if self._widens:
            return WidenedLinear(rounded.codes_OB, bias_O, rounded.scales_OG.flatten())
        if self._keep_dense:
            return self._dense(rounded.dense(self._dtype), bias_O)
        return lambda x_TI: F.linear(x_TI, rounded.dense(x_TI.dtype), bias_O)


def works(make: Callable[[Tensor], LinearMap], dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, has the kernels for the dtype."""
    try:
        make(torch.ones(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # no such operator or no such instruction
        return False
    return True


def _int8(weight_OI: Tensor) -> Int8Linear:
    weight = Packed("int8", weight_OI.to(torch.int8), torch.ones_like(weight_OI[:, :1]))
    return Int8Linear(weight, None, Linear(weight_OI))


def _int4(weight_OI: Tensor) -> LinearMap:
    codes = torch.full((16, 16), 0x99, dtype=torch.uint8)  # of 16 rows of 32 inputs
    weight = Packed("int4", codes, torch.ones(16, 1))
    linear = Int4Linear(weight, None)
    return lambda x_TI: linear(F.pad(x_TI, (0, 16)))
