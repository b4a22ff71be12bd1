"""What a format of quantized weights is, and what the readers of all formats share.

Shape legend: O outputs, I inputs, G groups of inputs in a row, B bytes.
"""

from __future__ import annotations

from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.quantization.packed import Packed


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

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        """The weight [O, I] of the module of this name; None where it is not quantized.

        Raises ModelError for tensors that are missing or do not fit one another.
        """
        ...


NOT_NEEDED = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
    *("output_scale", "weight_shape"),
)
"""Scales of activations, which keep 16 bits here, and what other tensors say, too."""

SMALLEST_GROUP = 16
"""As `Packed` has it."""


def skip_not_needed(tensors: TensorReader, name: str) -> None:
    tensors.skip(*[f"{name}.{ending}" for ending in NOT_NEEDED])


def read_scales(tensors: TensorReader, name: str) -> Tensor:
    """Scales as they are, or in float32 if the file has the exponents of powers of 2 (E8M0)."""
    scales = tensors.read(name)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        return scales
    # they are the exponent bits of float32: no function of a GPU rounds them; 0 is 2^-127
    bits = scales.int().bitwise_left_shift_(23).masked_fill_(scales == 0, 1 << 22)
    return bits.view(torch.float32)


def groups_of(tensors: TensorReader, name: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scales or zeros [O, G] of what a checkpoint has: of the tensor, of its rows, or of groups."""
    num_out, num_in = shape
    if values.numel() == 1:
        return values.reshape(1, 1).expand(num_out, 1).contiguous()
    if values.dim() == 1:
        values = values[:, None]
    fits = values.dim() == 2 and len(values) == num_out and not num_in % values.shape[1]
    if not fits or 1 < values.shape[1] and num_in // values.shape[1] < SMALLEST_GROUP:
        raise misshapen(tensors, name, values, shape)
    return values.contiguous()


def blocks_of(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Scales [O, G] of blocks; where the last one is cut, of the largest groups that fit."""
    (num_out, num_in), (block_out, block_in) = shape, block
    group_size = gcd(num_in, block_in)
    scales = scales.repeat_interleave(block_in // group_size, 1)[:, : num_in // group_size]
    return scales.repeat_interleave(block_out, 0)[:num_out]


def nibbles(pairs: Tensor) -> Tensor:
    """Codes of 4 bits [O, 2 * B] of bytes [O, B], each byte's lower half first."""
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def check_shape(
    tensors: TensorReader, name: str, found: Tensor, wanted: tuple[int, ...], shape: tuple[int, int]
) -> None:
    if tuple(found.shape) != wanted:
        raise misshapen(tensors, name, found, shape)


def misshapen(
    tensors: TensorReader, name: str, found: Tensor, shape: tuple[int, ...]
) -> ModelError:
    return ModelError(
        f"{tensors.where}: tensor {name} is {list(found.shape)}, which is not supported for a "
        f"weight of {list(shape)}; are config.json and the safetensors files of the same model?"
    )
