"""Gemma 1 (Google, 2024): Llama with GeGLU, scaled embeddings, and norms that hold their weight
less one."""

from __future__ import annotations

from typing import Any

from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import build_serial


class GemmaConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False


def build(config: GemmaConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.rms_norm_eps, plus_one=True, round_first=False)
    rope, bias = make.rope(), config.attention_bias

    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias),
        lambda at, number: make.gated_mlp(f"{at}.mlp", activation="gelu_tanh"),
        embedding_scale=make.rounded(make.shape.hidden_size**0.5),
    )


GEMMA = Family(GemmaConfig, build)
