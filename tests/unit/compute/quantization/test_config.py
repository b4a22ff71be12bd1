"""Every layout that a config.json may name has a reader, and each config the one it asks for."""

from __future__ import annotations

from typing import get_args

from common.quantization import Layout, read_quantization
from services.compute.quantization.config import FORMATS, format_of
from services.compute.quantization.fp8 import Fp8
from services.compute.quantization.integers import Gptq


def test_every_layout_has_a_reader() -> None:
    assert set(FORMATS) == set(get_args(Layout))


def test_readers_know_what_config_json_says() -> None:
    block = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert format_of(read_quantization({"quantization_config": block})) == Fp8((64, 32), True)
    gptq = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    assert format_of(read_quantization({"quantization_config": gptq})) == Gptq(False)
    assert format_of(read_quantization({})) is None
