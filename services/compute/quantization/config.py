"""Which reader has the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.quantization import Layout, QuantizationConfig
from services.compute.quantization.compressed_tensors import CompressedTensors
from services.compute.quantization.format import WeightFormat
from services.compute.quantization.fp4 import ModelOptFp4, Mxfp4
from services.compute.quantization.fp8 import Fp8
from services.compute.quantization.integers import Awq, Gptq

FORMATS: Mapping[Layout, Callable[[QuantizationConfig], WeightFormat]] = {
    "awq": lambda config: Awq(),
    "compressed-tensors": lambda config: CompressedTensors(config.block, config.inputs_8bit),
    "fp8": lambda config: Fp8(config.block, "fp8" in config.inputs_8bit),
    "gptq": lambda config: Gptq(config.zeros_less_one),
    "modelopt_fp4": lambda config: ModelOptFp4(),
    "mxfp4": lambda config: Mxfp4(),
}


def format_of(config: QuantizationConfig | None) -> WeightFormat | None:
    return None if config is None else FORMATS[config.layout](config)
