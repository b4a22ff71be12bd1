"""OLMo 2 and OLMo 3 (Ai2, 2024 and 2025): norms behind the blocks only, and of all heads together.

OLMo 3 has windows in three of four layers, whose rotation is not scaled.
"""

from __future__ import annotations

from typing import Any

from services.compute.layers.parts import Attention
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig, WindowedConfig
from services.compute.models.serial_layers import POST_NORMS, build_serial


class Olmo2Config(FamilyConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    @property
    def rope(self) -> RopeDefaults:
        return RopeDefaults()


class Olmo3Config(WindowedConfig, Olmo2Config):
    sliding_window: int | None = 4096

    @property
    def rope(self) -> RopeDefaults:
        return RopeDefaults(theta=500_000.0, scales_windows=False)

    def is_local(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0


def build(config: Olmo2Config, make: Builder[Any]) -> Decoder[Any]:
    norm, bias = NormForm(config.rms_norm_eps, round_first=False), config.attention_bias
    ropes = {k: make.rope(k, config.rope) for k in ("full_attention", "sliding_attention")}

    def attention(at: str) -> Attention[Any]:
        rope = ropes[make.layer_type]
        norms = make.norms_of_all_heads(at, norm, rope)
        return make.attention(at, rope, qkv_bias=bias, out_bias=bias, **norms)

    return build_serial(
        make,
        norm,
        attention,
        lambda at, number: make.gated_mlp(f"{at}.mlp"),
        norms=POST_NORMS,
    )


OLMO2, OLMO3 = Family(Olmo2Config, build), Family(Olmo3Config, build)
