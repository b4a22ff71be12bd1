"""Nemotron and Minitron, dense (NVIDIA, 2024): layer norms, squared ReLU; Arcee (2025) with RMS."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig


class NemotronConfig(FamilyConfig):
    hidden_act: Literal["relu2"] = "relu2"
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class ArceeConfig(FamilyConfig):
    hidden_act: Literal["relu2"] = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


def _build(
    config: NemotronConfig | ArceeConfig, make: Builder[Any], norm: NormForm, rope: RopeDefaults
) -> Decoder[Any]:
    turn, bias = make.rope(defaults=rope), config.attention_bias

    def layer(at: str) -> Layer[Any]:
        up, down = f"{at}.mlp.up_proj", f"{at}.mlp.down_proj"
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(f"{at}.self_attn", turn, qkv_bias=bias, out_bias=bias),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.mlp(up, down, config.mlp_bias, "relu2"),
            ),
        )

    return make.decoder(layer, norm)


def build(config: NemotronConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.norm_eps, "layer", has_bias=True, plus_one=True, round_first=False)
    return _build(config, make, norm, RopeDefaults(partial_rotary_factor=0.5))


def build_arcee(config: ArceeConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, NormForm(config.rms_norm_eps), RopeDefaults())


NEMOTRON, ARCEE = Family(NemotronConfig, build), Family(ArceeConfig, build_arcee)
