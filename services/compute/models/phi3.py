"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Microsoft, 2024 and 2025): merged projections, LongRoPE."""

from __future__ import annotations

from typing import Any

from services.compute.layers.parts import Attention
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import build_serial


class Phi3Config(WindowedConfig):
    rms_norm_eps: float = 1e-5


def build(config: Phi3Config, make: Builder[Any]) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def attention(at: str) -> Attention[Any]:
        qkv = make.qkv([f"{at}.qkv_proj"], rope, bias=False)
        return make.mixer(qkv, make.out(f"{at}.o_proj"), rope)

    return build_serial(
        make, norm, attention, lambda at, number: make.gated_mlp(f"{at}.mlp", merged=True)
    )


PHI3 = Family(Phi3Config, build)
