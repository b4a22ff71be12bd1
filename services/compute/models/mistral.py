"""Mistral 7B and its dense successors (Mistral AI, 2023): Llama, at first with a sliding window."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class MistralConfig(WindowedConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096


def build(config: MistralConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(f"{at}.self_attn", rope),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp"),
            ),
        )

    return make.decoder(layer, norm)


MISTRAL = Family(MistralConfig, build)  # Ministral's layers may differ in their windows
