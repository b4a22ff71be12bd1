"""FP8 weights: of Hugging Face's `fp8` and `fbgemm_fp8`, of ModelOpt and of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.errors import ModelError
from services.compute.quantization.format import (
    TensorReader,
    blocks_of,
    check_shape,
    groups_of,
    skip_not_needed,
)
from services.compute.quantization.packed import Kind, Packed

SCALES = ("weight_scale_inv", "weight_scale")
"""DeepSeek's name is for what a code is multiplied by, too."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """E4M3 codes with a scale for the tensor, for each row, or for each block."""

    block: tuple[int, int] | None = None  # rows and inputs
    kind: Kind = "fp8"

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        scale = next((s for s in SCALES if tensors.has(f"{name}.{s}")), None)
        if scale is None:
            return None
        codes, scales = tensors.read(f"{name}.weight"), tensors.read(f"{name}.{scale}")
        check_shape(tensors, f"{name}.weight", codes, shape, shape)
        if codes.dtype != torch.float8_e4m3fn:
            raise ModelError(
                f"{tensors.where}: tensor {name}.weight is {codes.dtype}, and has a scale; of FP8 "
                "weights, float8_e4m3fn is supported."
            )
        skip_not_needed(tensors, name)
        name = f"{name}.{scale}"
        if self.block is not None and scales.dim() == 2:
            return Packed("fp8", codes, blocks_of(tensors, name, scales, shape, self.block))
        return Packed("fp8", codes, groups_of(tensors, name, scales, shape).float())
