"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Microsoft, 2024 and 2025): merged projections, LongRoPE."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class Phi3Config(WindowedConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-5


def build(config: Phi3Config, make: Builder[Any]) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.mixer(
                    make.qkv([f"{at}.self_attn.qkv_proj"], rope, bias=False),
                    make.out(f"{at}.self_attn.o_proj"),
                    rope,
                ),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", merged=True),
            ),
        )

    return make.decoder(layer, norm)


PHI3 = Family(Phi3Config, build)
