"""FP4 weights: NVFP4 and MXFP4, of ModelOpt and of compressed-tensors.

Two E2M1 codes in a byte, the earlier input in its lower half. NVFP4: groups of 16 with E4M3 scales
and one scale for all of them; MXFP4 (OCP Microscaling): groups of 32 whose scales are powers of 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.quantization.format import (
    TensorReader,
    check_shape,
    groups_of,
    skip_not_needed,
)
from services.compute.quantization.packed import Kind, Packed, halves

E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class Fp4:
    """E2M1 codes as one of the two libraries names their tensors."""

    weight: str = "weight"
    overall: str = "weight_scale_2"
    divides: bool = False  # the overall scale: what the scales are to be divided by
    kind: Kind = "fp4"

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.weight_scale"):
            return None
        pairs = tensors.read(f"{name}.{self.weight}")
        check_shape(tensors, f"{name}.{self.weight}", pairs, (shape[0], shape[1] // 2), shape)
        scales = tensors.read(f"{name}.weight_scale")
        skip_not_needed(tensors, name)
        codes = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
        if scales.dtype == torch.uint8:
            wide = torch.exp2(scales.float() - E8M0_BIAS)
        else:
            wide = self._scaled(scales.float(), tensors.read(f"{name}.{self.overall}").float())
        return Packed("fp4", halves(codes), groups_of(tensors, f"{name}.weight_scale", wide, shape))

    def _scaled(self, scales: Tensor, overall: Tensor) -> Tensor:
        return scales / overall if self.divides else scales * overall
