"""How checkpoints hold quantized weights: what a format is, and which one a config.json names.

Shape legend: O outputs, I inputs, G groups of inputs in a row.
"""

from __future__ import annotations

from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.quantization.packed import Kind, Packed


class TensorReader(Protocol):
    """The tensors of a checkpoint by name, as they are in its files."""

    @property
    def where(self) -> str:
        """What an error calls the checkpoint."""
        ...

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor:
        """The tensor on the device; raises ModelError if there is none of this name."""
        ...

    def skip(self, *prefixes: str) -> None:
        """Accept tensors that are not needed, whose names begin so, if they are there."""
        ...


class WeightFormat(Protocol):
    """One way to quantize linear maps.

    Whether a map is quantized is read off its tensors: what a checkpoint leaves out is plain there.
    """

    @property
    def kind(self) -> Kind:
        """What most of its weights become; random ones are made of it."""
        ...

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        """The weight [O, I] of the module of this name; None where it is not quantized.

        Raises ModelError for tensors that are missing or do not fit one another.
        """
        ...


NOT_NEEDED = (
    "input_scale",
    "output_scale",
    "input_zero_point",
    "weight_shape",
    "input_global_scale",
)
"""Scales of activations, which keep 16 bits here, and what other tensors say, too."""


def skip_not_needed(tensors: TensorReader, name: str) -> None:
    tensors.skip(*[f"{name}.{ending}" for ending in NOT_NEEDED])


def groups_of(tensors: TensorReader, name: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scales or zeros [O, G] of what a checkpoint has: of the tensor, of its rows, or of groups."""
    num_out, num_in = shape
    if values.numel() == 1:
        return values.reshape(1, 1).expand(num_out, 1).contiguous()
    if values.dim() == 1:
        values = values[:, None]
    if len(values) != num_out or num_in % values.shape[1]:
        raise misshapen(tensors, name, tuple(values.shape), shape)
    return values.contiguous()


def blocks_of(
    tensors: TensorReader, name: str, scales: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """Scales [O, G] of blocks; where the last one is cut, of the largest groups that fit."""
    (num_out, num_in), (block_out, block_in) = shape, block
    if tuple(scales.shape) != (-(-num_out // block_out), -(-num_in // block_in)):
        raise misshapen(tensors, name, tuple(scales.shape), shape)
    group_size = gcd(num_in, block_in)
    scales = scales.repeat_interleave(block_in // group_size, 1)[:, : num_in // group_size]
    return scales.repeat_interleave(block_out, 0)[:num_out].contiguous()


def misshapen(
    tensors: TensorReader, name: str, found: tuple[int, ...], shape: tuple[int, ...]
) -> ModelError:
    return ModelError(
        f"{tensors.where}: tensor {name} is {list(found)}, which does not fit a weight of "
        f"{list(shape)}; config.json and the safetensors files are not of the same model."
    )


def check_shape(
    tensors: TensorReader, name: str, found: Tensor, wanted: tuple[int, ...], shape: tuple[int, int]
) -> None:
    if tuple(found.shape) != wanted:
        raise misshapen(tensors, name, tuple(found.shape), shape)


def none_if_zero(zeros_OG: Tensor) -> Tensor | None:
    return zeros_OG if torch.any(zeros_OG) else None
