"""The layers that hold weights: embedding, norm and linear maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, TypeAlias, TypeVar

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from services.compute.kernels.linear.hopper_int4_config import whole_zeros
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS
from services.compute.quantization.at_load import rounded_to_int8
from services.compute.quantization.packed import Packed, Weight, can_multiply, filled


@dataclass(frozen=True, slots=True)
class Embedding:
    """Row v of the table, times the scale, is the vector of token v."""

    weight_VE: Tensor
    scale: float = 1.0

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Look up [T] ids, all below V (the runner has checked them)."""
        x_TE = F.embedding(tokens_T, self.weight_VE)
        return x_TE if self.scale == 1.0 else x_TE.mul_(self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm, or layer norm: x, less its mean, over its root mean square, times the weight.

    Mean and division are float32. With `round_first` the GPU's kernels round the quotient to x's
    dtype before they multiply, as Llama's code does, and without it once, at the end, as that of
    Gemma, OLMo 2 and Cohere does; in plain torch it is always once. The weight may be float32.
    """

    weight_E: Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias_E: Tensor | None = None
    round_first: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.weight_E.dtype
        if self.kind == "rms" and dtype == x.dtype:
            return F.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        if self.kind == "layer":
            normed = F.layer_norm(
                x.to(dtype), self.weight_E.shape, self.weight_E, self.bias_E, self.eps
            )
        else:
            normed = F.rms_norm(x.to(dtype), self.weight_E.shape, self.weight_E, self.eps)
        return normed.to(x.dtype)


LinearMap: TypeAlias = "Callable[[Tensor], Tensor]"
"""y = x W^T + b for x [T, I]."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The map as it stands; several maps of one input are one by stacking their rows."""

    weight_OI: Tensor
    bias_O: Tensor | None = None

    @property
    def num_out(self) -> int:
        return len(self.weight_OI)

    @property
    def num_in(self) -> int:
        return self.weight_OI.shape[1]

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(frozen=True, slots=True)
class SummedLinear(Linear):
    """The map that ends a part, whose sums have the same bits however many ranks share its inputs.

    A bias is that of the rank with the first segment.
    """

    num_segments: int = NUM_SEGMENTS  # that its inputs here are of those of all ranks


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """The map of a weight in fewer bytes; by itself it multiplies as slowly as its reference."""

    weight: Packed
    bias_O: Tensor | None = None
    dense_OI: Tensor | None = None
    """The numbers as they are, for products of many rows, where memory is plenty."""

    has_whole_zeros: bool = False
    """Whether codes less their zeros are known to be numbers that 16 bits have."""

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    @property
    def num_in(self) -> int:
        return self.weight.num_inputs

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight.dense(x_TI.dtype), self.bias_O)


AnyLinear: TypeAlias = Linear | QuantizedLinear

M = TypeVar("M", covariant=True)


class LinearMaker(Protocol[M]):
    """Makes the linear maps of a device, of weights that may be quantized."""

    def __call__(
        self, weight: Weight, bias_O: Tensor | None, dense_OI: Tensor | None = None, /
    ) -> M:
        """`dense_OI`: the numbers of a weight in codes, where the model has them anyway."""
        ...

    def summed(self, weight: Weight, bias_O: Tensor | None, num_inputs: int) -> M:
        """A map whose results are added up: it has its share of so many inputs."""
        ...

    def router(self, weight_XE: Tensor, bias_X: Tensor | None) -> M:
        """Of a weight in float32: a map whose results are in float32, too; no number is rounded
        before it is multiplied."""
        ...

    def experts(
        self, weights: Iterable[Weight], num_experts: int, bias_XO: Tensor | None
    ) -> tuple[M, ...]:
        """The maps of so many experts, whose weights [O, I] come one after the other: one for
        each, or one that has the rows of all."""
        ...


@dataclass(frozen=True, slots=True)
class KernelLinears:
    """Makes the linear maps of a GPU."""

    dtype: torch.dtype
    keeps_dense: bool  # beside packed weights that many rows are not multiplied with as they are
    num_segments: int = 0  # of a rank's share of a sum; 0: sums are not made of segments

    def __call__(
        self, weight: Weight, bias_O: Tensor | None, dense_OI: Tensor | None = None
    ) -> AnyLinear:
        if not isinstance(weight, Packed):
            return Linear(weight, bias_O)
        if weight.inputs_8bit or self.num_segments:  # by which rows depend on their number
            dense_OI = None
        elif dense_OI is None and self.keeps_dense:
            dense_OI = weight.dense(self.dtype)
        adjacent = weight.with_adjacent_rows()
        return QuantizedLinear(adjacent, bias_O, dense_OI, whole_zeros(adjacent))

    def summed(self, weight: Weight, bias_O: Tensor | None, num_inputs: int) -> AnyLinear:
        if not self.num_segments or isinstance(weight, Packed):
            return self(weight, bias_O)
        check_segments(weight.shape[1], num_inputs, self.num_segments)
        return SummedLinear(weight, bias_O, self.num_segments)

    def router(self, weight_XE: Tensor, bias_X: Tensor | None) -> Linear:
        rounded_XE = weight_XE.to(self.dtype)
        if torch.equal(rounded_XE.float(), weight_XE):
            return Linear(rounded_XE, bias_X)
        return Linear(weight_XE, None if bias_X is None else bias_X.float())

    def experts(
        self, weights: Iterable[Weight], num_experts: int, bias_XO: Tensor | None
    ) -> tuple[AnyLinear]:
        weight = filled(map(_multipliable, weights), num_experts, _rounded)
        bias_O = None if bias_XO is None else bias_XO.flatten()
        if not isinstance(weight, Packed):
            return (Linear(weight, bias_O),)
        weight = weight.with_adjacent_rows().with_halfwords()
        return (QuantizedLinear(weight, bias_O),)


def check_segments(num_here: int, num_inputs: int, num_segments: int) -> None:
    """Raise ConfigError where so many inputs here are no whole segments of those of all ranks."""
    num_ranks = NUM_SEGMENTS // num_segments
    if num_ranks > 1 and (num_inputs % NUM_SEGMENTS or num_here * num_ranks != num_inputs):
        raise ConfigError(
            f"compute.tensor_parallel_size is {num_ranks}: with compute.batch_invariant a sum over "
            f"{num_inputs} inputs is one of eight equal segments, and this rank would have "
            f"{num_here} inputs; take another size, or leave batch_invariant out."
        )


def _multipliable(weight: Weight) -> Weight:
    """The same, or in 8 bits where kernels for experts do not multiply by it."""
    return weight if can_multiply(weight) else _rounded(weight)


def _rounded(weight: Weight) -> Packed:
    say_rounded()
    return rounded_to_int8(weight)


@cache  # not for each of thousands of experts
def say_rounded() -> None:
    structlog.get_logger().warning(
        "experts are rounded to 8 bits",
        why="those of a layer are quantized in different ways, or with inputs in an order of their "
        "own (desc_act) or groups that are no multiple and no part of 128, which kernels do not "
        "multiply by; each weight changes by at most 1/254 of the largest of its row",
    )
