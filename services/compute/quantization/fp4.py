"""FP4 weights: NVFP4 and MXFP4, of ModelOpt, of compressed-tensors and of gpt-oss.

Two E2M1 codes in a byte, the earlier input in its lower half. NVFP4: groups of 16 with E4M3 scales
and one scale for all of them; MXFP4 (OCP Microscaling): groups of 32 whose scales are powers of 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ModelError
from services.compute.quantization.format import (
    TensorReader,
    check_shape,
    groups_of,
    nibbles,
    read_scales,
    skip_not_needed,
)
from services.compute.quantization.packed import BLOCK, Packed, halves


class ModelOptFp4:
    """NVFP4 as ModelOpt names its tensors."""

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.weight_scale"):
            return None
        pairs = tensors.read(f"{name}.weight")
        scales = read_scales(tensors, f"{name}.weight_scale").float()
        scales.mul_(tensors.read(f"{name}.weight_scale_2").float())
        return packed_fp4(tensors, f"{name}.weight", pairs, scales, shape)


class Mxfp4:
    """MXFP4 as gpt-oss names the tensors of its experts: the only weights that it quantizes."""

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.blocks"):
            return None
        pairs = tensors.read(f"{name}.blocks").flatten(1)
        scales = read_scales(tensors, f"{name}.scales")
        check_shape(tensors, f"{name}.scales", scales, (shape[0], shape[1] // BLOCK), shape)
        return packed_fp4(tensors, f"{name}.blocks", pairs, scales, shape)


def packed_fp4(
    tensors: TensorReader, name: str, pairs: Tensor, scales: Tensor, shape: tuple[int, int]
) -> Packed:
    """The weight of bytes [O, I / 2] of this name, and scales that have all factors in them."""
    check_shape(tensors, name, pairs, (shape[0], shape[1] // 2), shape)
    if pairs.dtype != torch.uint8 or shape[1] % BLOCK:
        raise ModelError(
            f"{tensors.where}: tensor {name} is {pairs.dtype} for {shape[1]} inputs; of FP4 "
            f"weights, torch.uint8 for multiples of {BLOCK} inputs is supported."
        )
    module = name.rpartition(".")[0]
    skip_not_needed(tensors, module)
    scales_OG = groups_of(tensors, f"{module}.weight_scale", scales, shape)
    return Packed("fp4", halves(nibbles(pairs)), shortened(scales_OG))


HALF_ULP = 2.0**-9
"""What a factor of at most this beside 1 changes a number by: half of bfloat16's last place."""


def shortened(scales_OG: Tensor) -> Tensor:
    """Scales (float32) in 16 bits where bfloat16 has them all, or float16 is near enough.

    With 32 of them for 16 weights, NVFP4 took 6 bits a weight. A weight of a scale of float16 is at
    most 1/8 of bfloat16's last place off; scales below 2^-16 have too few bits there. MXFP4's are
    powers of 2 and so bfloat16's, whatever their size: all experts have scales of one dtype, and
    their products multiply them into codes at once.
    """
    half, brief = scales_OG.half(), scales_OG.bfloat16()
    if torch.equal(brief.float(), scales_OG):
        return brief
    is_near = (half.float() - scales_OG).abs() <= HALF_ULP * scales_OG.abs()
    return half if is_near.all() else scales_OG
