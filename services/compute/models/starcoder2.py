"""StarCoder2 (BigCode, 2024): layer norms, biases, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import build_serial


class Starcoder2Config(WindowedConfig):
    norm_epsilon: float = 1e-5
    use_bias: bool = True


def build(config: Starcoder2Config, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.norm_epsilon, kind="layer", has_bias=True, round_first=False)
    rope, bias = make.rope(), config.use_bias

    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias),
        lambda at, number: make.mlp(f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", bias, "gelu_tanh"),
    )


STARCODER2 = Family(Starcoder2Config, build)
