"""FP8 weights: of Hugging Face's `fp8` and `fbgemm_fp8`, of ModelOpt and of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.quantization.format import (
    TensorReader,
    blocks_of,
    check_shape,
    groups_of,
    read_scales,
    skip_not_needed,
)
from services.compute.quantization.packed import Packed

SCALES = ("weight_scale_inv", "weight_scale")
"""DeepSeek's name is for what a code is multiplied by, too."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 codes with a scale for the tensor, for each row, or for each block."""

    block: tuple[int, int] | None = None  # rows and inputs
    inputs_8bit: bool = False  # as `Packed` has it

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        scale = next((s for s in SCALES if tensors.has(f"{name}.{s}")), None)
        if scale is None:
            return None
        return self.of_codes(tensors, f"{name}.{scale}", tensors.read(f"{name}.weight"), shape)

    def of_codes(
        self, tensors: TensorReader, scale: str, codes: Tensor, shape: tuple[int, int]
    ) -> Packed:
        """The weight of these codes and the scales of this name."""
        name = scale.rpartition(".")[0]
        check_shape(tensors, f"{name}.weight", codes, shape, shape)
        if codes.dtype != torch.float8_e4m3fn:
            raise ModelError(
                f"{tensors.where}: tensor {name}.weight is {codes.dtype}, and has a scale; of FP8 "
                "weights, float8_e4m3fn is supported."
            )
        skip_not_needed(tensors, name)
        scales = read_scales(tensors, scale)
        if scales.dim() == 4:  # ModelOpt's blocks: [rows, 1, inputs, 1]
            scales = scales[:, 0, :, 0]
        if self.block is not None and scales.shape == _num_blocks(shape, self.block):
            scales = blocks_of(scales, shape, self.block)
        scales_OG = groups_of(tensors, scale, scales, shape).float()
        return Packed("fp8", codes, scales_OG, inputs_8bit=self.inputs_8bit)


def _num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
