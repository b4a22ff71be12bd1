"""compressed-tensors, the format of llm-compressor: each module says by its tensors what it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.compute.quantization.format import TensorReader
from services.compute.quantization.fp4 import Fp4
from services.compute.quantization.fp8 import Fp8
from services.compute.quantization.integers import read_int8, read_packed_integers
from services.compute.quantization.packed import Kind, Packed

FP4 = Fp4(weight="weight_packed", overall="weight_global_scale", divides=True)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Integers, FP8 and FP4, also several of them in one checkpoint."""

    kind: Kind
    block: tuple[int, int] | None = None

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if not tensors.has(f"{name}.weight_scale"):
            return None
        if tensors.has(f"{name}.weight_packed"):
            words = tensors.read(f"{name}.weight_packed")
            if words.dtype == torch.uint8:
                return FP4.read(tensors, name, shape)
            return read_packed_integers(tensors, name, words, shape)
        codes = tensors.read(f"{name}.weight")
        if codes.dtype == torch.int8:
            return read_int8(tensors, name, codes, shape)
        return Fp8(self.block).read(tensors, name, shape)
