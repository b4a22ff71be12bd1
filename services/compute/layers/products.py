"""Matrix products into memory that is there already, as captured graphs need them.

Each chooses its kernel by the weight and the number of rows; nothing else reads weights.

Shape legend: T tokens, I inputs, O outputs, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.linear.hopper_matmul import hopper_gate_up, hopper_matmul
from services.compute.kernels.linear.hopper_matmul_config import HopperTiling
from services.compute.kernels.linear.matmul import matmul, tile_for
from services.compute.kernels.linear.matvec import gate_up, matvec, norm_gate_up, norm_matvec
from services.compute.kernels.linear.skinny_matmul import skinny_gate_up, skinny_matmul
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_TOKENS,
    SkinnyWork,
    skinny_gate_up_options,
    skinny_options,
)
from services.compute.kernels.linear.summed_matmul import summed_matmul
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.kernels.rows.quantized_rows import RowForm
from services.compute.layers.parts import Activation
from services.compute.layers.weighted_layers import AnyLinear, Linear, SummedLinear

L = TypeVar("L", contravariant=True)


class Product(Protocol[L]):
    """How a device multiplies by one kind of linear map; one object for all layers. Launches depend
    on shapes and dtypes alone, as captured graphs need."""

    @property
    def fused(self) -> FusedProduct[L] | None:
        """What it can do in one launch with its neighbours, if anything."""
        ...

    def row_form(self, num_tokens: int, linear: L, /) -> RowForm | None:
        """How it takes its input quantized, if it does."""
        ...

    def __call__(self, x_TI: Any, linear: L, out_TO: Tensor, /) -> None:
        """out = x W^T + b; `out` may be of a wider dtype than x, which is a tensor, or, where there
        is a form, QuantizedRows."""
        ...


class FusedProduct(Protocol[L]):
    """Products that take the norm before them, or the activation behind them, into their launch."""

    def can_gate(self, num_tokens: int, linear: L) -> bool:
        """Whether the product of gates and ups is one launch with their activation."""
        ...

    def gated(self, x_TI: Tensor, linear: L, activation: Activation, out_TF: Tensor, /) -> None: ...

    def can_norm(self, num_tokens: int, linear: L, norms_behind: bool) -> bool:
        """Whether the product takes the norm of its input into its launch, where parts have norms
        behind them, too, or have none."""
        ...

    def normed(self, normed: NormedInput, linear: L, out_TO: Tensor, /) -> None: ...

    def normed_gated(
        self, normed: NormedInput, linear: L, activation: Activation, out_TF: Tensor, /
    ) -> None: ...


Products: TypeAlias = Mapping[type[AnyLinear], Product[Any]]
"""The product of each kind of linear map."""


@dataclass(frozen=True, slots=True)
class InvariantGates:
    """A `FusedProduct` of gates and ups whose rows do not depend on their batch: with more than 64
    rows hopper_gate_up has the bits of `matmul` and the activation."""

    tiling: HopperTiling

    def can_gate(self, num_tokens: int, linear: Linear) -> bool:
        is_equal = linear.bias_O is None and self.tiling.has_equal_bits(linear.weight_OI)
        return num_tokens > MAX_TOKENS and is_equal

    def gated(self, x_TI: Tensor, linear: Linear, activation: Activation, out_TF: Tensor) -> None:
        hopper_gate_up(x_TI, linear.weight_OI, out_TF, activation, self.tiling)

    def can_norm(self, num_tokens: int, linear: Linear, norms_behind: bool) -> bool:
        return False

    def normed(self, normed: NormedInput, linear: Linear, out_TO: Tensor) -> None:
        raise AssertionError("rows that do not depend on their batch are normed by themselves")

    def normed_gated(
        self, normed: NormedInput, linear: Linear, activation: Activation, out_TF: Tensor
    ) -> None:
        self.normed(normed, linear, out_TF)


@dataclass(frozen=True, slots=True)
class InvariantProduct:
    """A `Product` with one order of summation for every number of rows: one tiling up to 64, and
    more by hopper_matmul, which has the same bits, where the device has it. Where ranks have a part
    of the outputs each, the tiling is that of all of them."""

    num_ranks: int = 1
    hopper: HopperTiling | None = None

    @property
    def fused(self) -> FusedProduct[Linear] | None:
        return None if self.hopper is None else InvariantGates(self.hopper)

    def row_form(self, num_tokens: int, linear: Linear) -> None:
        return None

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        weight_OI, bias_O, hopper = linear.weight_OI, linear.bias_O, self.hopper
        is_alike = out_TO.dtype is x_TI.dtype and len(x_TI) > MAX_TOKENS
        if hopper is not None and is_alike and hopper.has_equal_bits(weight_OI):
            hopper_matmul(x_TI, weight_OI, bias_O, out_TO, hopper)
        else:
            tile = tile_for(linear.num_out * self.num_ranks, x_TI.dtype)
            matmul(x_TI, weight_OI, bias_O, out_TO, tile)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """The same for maps that end a part: whatever the number of rows, and of ranks."""

    work: SkinnyWork

    @property
    def fused(self) -> None:
        return None

    def row_form(self, num_tokens: int, linear: SummedLinear) -> None:
        return None

    def __call__(self, x_TI: Tensor, linear: SummedLinear, out_TO: Tensor) -> None:
        weight_OI, bias_O = linear.weight_OI, linear.bias_O
        summed_matmul(x_TI, weight_OI, bias_O, out_TO, linear.num_segments, self.work)


def cublas(x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
    """The library's product, whose summation order changes with the number of rows."""
    weight_IO = linear.weight_OI.t()
    if out_TO.dtype is not x_TI.dtype:
        torch.mm(x_TI, weight_IO, out_dtype=out_TO.dtype, out=out_TO)
        if linear.bias_O is not None:
            out_TO.add_(linear.bias_O)
    elif linear.bias_O is not None:
        torch.addmm(linear.bias_O, x_TI, weight_IO, out=out_TO)
    else:
        torch.mm(x_TI, weight_IO, out=out_TO)


MIN_OUTPUTS = 512
"""Smaller weights are not worth a kernel of their own."""


def suits(num_tokens: int, num_out: int, num_in: int) -> bool:
    """Whether skinny_matmul is faster than cuBLAS for weights of 16 bits.

    On an H200 at 16, 32 and 64 rows it was, by up to a quarter, or as fast, for all linear maps of
    an 8B and a 1B model. So was skinny_gate_up: at 64 rows 59 us against 67 and 19 against 22.
    """
    return 2 <= num_tokens <= MAX_TOKENS and num_in % 64 == 0 and num_out >= MIN_OUTPUTS


@dataclass(frozen=True, slots=True)
class ProductByRows:
    """A `Product` and its `FusedProduct`: matvec for one row, skinny_matmul where it suits, else
    cuBLAS, but for gates and ups where hopper_gate_up suits.

    With `pdl` launches of skinny_matmul are programmatic dependent ones, with `row_pdl` those of
    matvec.
    """

    work: SkinnyWork | None  # None: the device cannot run skinny_matmul
    pdl: bool = False
    row_pdl: bool = False
    choices: Choices = field(default_factory=Choices)
    hopper: HopperTiling | None = None  # None: the device cannot run hopper_gate_up

    @property
    def fused(self) -> FusedProduct[Linear]:
        return self

    def row_form(self, num_tokens: int, linear: Linear) -> None:
        return None

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        weight_OI, bias_O = linear.weight_OI, linear.bias_O
        if x_TI.shape[0] == 1:
            matvec(x_TI, weight_OI, bias_O, out_TO, pdl=self.row_pdl)
        elif self.work is not None and self._suits(x_TI.shape[0], weight_OI):
            self.choices.launch(
                skinny_options(len(x_TI), linear.num_out, linear.num_in, weight_OI.dtype),
                partial(skinny_matmul, x_TI, weight_OI, bias_O, out_TO, self.work, pdl=self.pdl),
            )
        else:
            cublas(x_TI, linear, out_TO)

    def can_gate(self, num_tokens: int, linear: Linear) -> bool:
        weight_OI, hopper = linear.weight_OI, self.hopper
        if num_tokens > MAX_TOKENS:
            has_kernel = hopper is not None and hopper.suits(weight_OI)
        else:
            has_kernel = num_tokens == 1 or self._suits(num_tokens, weight_OI)
        return linear.bias_O is None and has_kernel

    def gated(self, x_TI: Tensor, linear: Linear, activation: Activation, out_TF: Tensor) -> None:
        weight_OI, num_gates = linear.weight_OI, out_TF.shape[1]
        if len(x_TI) == 1:
            gate_up(x_TI, weight_OI, out_TF, activation, pdl=self.row_pdl)
        elif len(x_TI) > MAX_TOKENS:
            assert self.hopper is not None
            hopper_gate_up(x_TI, weight_OI, out_TF, activation, self.hopper)
        else:
            self.choices.launch(
                skinny_gate_up_options(len(x_TI), num_gates, linear.num_in, x_TI.dtype),
                partial(skinny_gate_up, x_TI, weight_OI, out_TF, activation, pdl=self.pdl),
            )

    def can_norm(self, num_tokens: int, linear: Linear, norms_behind: bool) -> bool:
        # Every program of the product would do both norms: at Gemma 3's 2,560 inputs that is as
        # many instructions as the product, and two sums more to wait for while few bytes are asked
        # for. A launch of its own does them once, while the product's programs ask for weights.
        return num_tokens == 1 and not norms_behind

    def normed(self, normed: NormedInput, linear: Linear, out_TO: Tensor) -> None:
        norm_matvec(normed, linear.weight_OI, linear.bias_O, out_TO, pdl=self.row_pdl)

    def normed_gated(
        self, normed: NormedInput, linear: Linear, activation: Activation, out_TF: Tensor
    ) -> None:
        norm_gate_up(normed, linear.weight_OI, out_TF, activation, pdl=self.row_pdl)

    def _suits(self, num_tokens: int, weight_OI: Tensor) -> bool:
        is_short = self.work is not None and weight_OI.dtype != torch.float32
        return is_short and suits(num_tokens, *weight_OI.shape)
