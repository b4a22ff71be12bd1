"""Hunyuan, dense (Tencent, 2025): norms of heads after the rotation."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig


class HunyuanConfig(FamilyConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def build(config: HunyuanConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias

    def layer(at: str) -> Layer[Any]:
        self_attn = f"{at}.self_attn"
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(
                    self_attn,
                    rope,
                    qkv_bias=bias,
                    out_bias=bias,
                    q_norm=make.head_norm(f"{self_attn}.query_layernorm", norm, rope),
                    k_norm=make.head_norm(f"{self_attn}.key_layernorm", norm, rope),
                    norms_rotated=True,
                ),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp"),
            ),
        )

    return make.decoder(layer, norm)


HUNYUAN = Family(HunyuanConfig, build)
