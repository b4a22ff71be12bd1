"""Nemotron and Minitron, dense (NVIDIA, 2024): layer norms, squared ReLU; Arcee (2025) with RMS."""

from __future__ import annotations

from typing import Any

from services.compute.layers.parts import MLP
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import build_serial


class NemotronConfig(FamilyConfig):
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class ArceeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


def _build(
    config: NemotronConfig | ArceeConfig, make: Builder[Any], norm: NormForm, rope: RopeDefaults
) -> Decoder[Any]:
    turn, bias = make.rope(defaults=rope), config.attention_bias

    def mlp(at: str, number: int) -> MLP[Any]:
        return make.mlp(f"{at}.mlp.up_proj", f"{at}.mlp.down_proj", config.mlp_bias, "relu2")

    return build_serial(
        make, norm, lambda at: make.attention(at, turn, qkv_bias=bias, out_bias=bias), mlp
    )


def build(config: NemotronConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.norm_eps, "layer", has_bias=True, plus_one=True, round_first=False)
    return _build(config, make, norm, RopeDefaults(partial_rotary_factor=0.5))


def build_arcee(config: ArceeConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, NormForm(config.rms_norm_eps), RopeDefaults())


NEMOTRON, ARCEE = Family(NemotronConfig, build), Family(ArceeConfig, build_arcee)
