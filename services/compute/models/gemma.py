"""Gemma 1 (Google, 2024): Llama with GeGLU, scaled embeddings, and norms that hold their weight
less one."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig

GeluTanh = Literal["gelu_pytorch_tanh", "gelu"]  # both mean the first in these models


class GemmaConfig(FamilyConfig):
    hidden_act: GeluTanh | None = None
    hidden_activation: GeluTanh | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False


def build(config: GemmaConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.rms_norm_eps, plus_one=True, round_first=False)
    rope, bias = make.rope(), config.attention_bias

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(f"{at}.self_attn", rope, qkv_bias=bias, out_bias=bias),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", activation="gelu_tanh"),
            ),
        )

    return make.decoder(layer, norm, embedding_scale=make.rounded(make.shape.hidden_size**0.5))


GEMMA = Family(GemmaConfig, build)
