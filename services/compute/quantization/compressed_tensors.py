"""compressed-tensors, the format of llm-compressor: each module says by its tensors what it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.compute.quantization.format import TensorReader, read_scales
from services.compute.quantization.fp4 import packed_fp4
from services.compute.quantization.fp8 import Fp8
from services.compute.quantization.integers import read_int8, read_packed_integers
from services.compute.quantization.packed import Kind, Packed


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Integers, FP8 and FP4, also several of them in one checkpoint."""

    block: tuple[int, int] | None = None  # of FP8
    inputs_8bit: frozenset[Kind] = frozenset()  # of weights of these kinds, as `Packed` has it

    def read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        found = self._read(tensors, name, shape)
        return found and replace(found, inputs_8bit=found.kind in self.inputs_8bit)

    def _read(self, tensors: TensorReader, name: str, shape: tuple[int, int]) -> Packed | None:
        if tensors.has(f"{name}.weight_packed"):
            words = tensors.read(f"{name}.weight_packed")
            if words.dtype != torch.uint8:
                return read_packed_integers(tensors, name, words, shape)
            scales = _fp4_scales(tensors, name)
            return packed_fp4(tensors, f"{name}.weight_packed", words, scales, shape)
        if not tensors.has(f"{name}.weight_scale"):
            return None
        codes = tensors.read(f"{name}.weight")
        if codes.dtype == torch.int8:
            return read_int8(tensors, name, codes, shape)
        return Fp8(self.block).of_codes(tensors, f"{name}.weight_scale", codes, shape)


def _fp4_scales(tensors: TensorReader, name: str) -> Tensor:
    scales = read_scales(tensors, f"{name}.weight_scale").float()
    overall = f"{name}.weight_global_scale"  # NVFP4's, and what its scales are divided by
    return scales / tensors.read(overall).float() if tensors.has(overall) else scales
