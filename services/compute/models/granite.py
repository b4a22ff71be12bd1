"""Granite 3 (IBM, 2024): Llama with four multipliers."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig


class GraniteConfig(FamilyConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def build(config: GraniteConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias
    scale = config.residual_multiplier

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(
                    f"{at}.self_attn",
                    rope,
                    qkv_bias=bias,
                    out_bias=bias,
                    scale=config.attention_multiplier,
                ),
                scale=scale,
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias),
                scale=scale,
            ),
        )

    return make.decoder(
        layer,
        norm,
        embedding_scale=config.embedding_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


GRANITE = Family(GraniteConfig, build)
