"""Llama 2, 3, 3.1, 3.2 and 3.3 (Meta, 2023 and 2024), and the many models of their shape.

Mistral 7B (Mistral AI, 2023) and Ministral have windows, Mistral's later dense models none, and
queries of Ministral 3 (2025) grow with their positions; ERNIE 4.5, dense (Baidu, 2025), rotates
neighbouring pairs; Seed-OSS (ByteDance, 2025) has biases before attention.
"""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt

from services.compute.layers.parts import Temperature
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import PLAIN_ROPE, Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.ends import LLAMA_NAMES, NAMES_BESIDE_IMAGES, TopNames
from services.compute.models.family import Family, FamilyConfig, WindowedConfig
from services.compute.models.serial_layers import build_serial


class LlamaConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralConfig(WindowedConfig):
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096


class Ministral3Config(MistralConfig):
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    llama_4_scaling_beta: float = 0.0
    original_max_position_embeddings: PositiveInt = 16_384  # from where on queries grow

    @property
    def temperature(self) -> Temperature | None:
        floor, strength = self.original_max_position_embeddings, self.llama_4_scaling_beta
        return Temperature(floor, strength, first=0) if strength else None


class Mistral3Config(Ministral3Config):
    """The text of one that sees: Mistral's, or Ministral 3's."""

    rms_norm_eps: float = 1e-6


class ErnieConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    use_bias: bool = False


class SeedOssConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def build(
    config: LlamaConfig,
    make: Builder[Any],
    defaults: RopeDefaults = PLAIN_ROPE,
    out_bias: bool | None = None,
) -> Decoder[Any]:
    """Without `out_bias` attention has a bias behind it if it has one before it."""
    norm, rope = NormForm(config.rms_norm_eps), make.rope(defaults=defaults)
    bias = config.attention_bias
    out_bias = bias if out_bias is None else out_bias

    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=out_bias),
        lambda at, number: make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias),
    )


def build_mistral(config: MistralConfig, make: Builder[Any]) -> Decoder[Any]:
    return build(LlamaConfig(rms_norm_eps=config.rms_norm_eps), make)


def build_ministral3(
    config: Ministral3Config, make: Builder[Any], names: TopNames = LLAMA_NAMES
) -> Decoder[Any]:
    rope, temperature = make.rope(), config.temperature
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope, temperature=temperature),
        lambda at, number: make.gated_mlp(f"{at}.mlp"),
        names=names,
    )


def build_beside_images(config: Mistral3Config, make: Builder[Any]) -> Decoder[Any]:
    """The text model of one that sees: its other parts stay in the files."""
    make.skip("vision_tower.", "multi_modal_projector.")
    return build_ministral3(config, make, NAMES_BESIDE_IMAGES)


def build_ernie(config: ErnieConfig, make: Builder[Any]) -> Decoder[Any]:
    bias, rope = config.use_bias, RopeDefaults(theta=500_000.0, interleaved=True)
    llama = LlamaConfig(rms_norm_eps=config.rms_norm_eps, attention_bias=bias, mlp_bias=bias)
    return build(llama, make, rope)


def build_seed_oss(config: SeedOssConfig, make: Builder[Any]) -> Decoder[Any]:
    llama = LlamaConfig(
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
    return build(llama, make, out_bias=config.attention_out_bias)


LLAMA, MISTRAL = Family(LlamaConfig, build), Family(MistralConfig, build_mistral)
MINISTRAL3 = Family(Ministral3Config, build_ministral3)
MISTRAL3_IMAGES = Family(Mistral3Config, build_beside_images)
ERNIE = Family(ErnieConfig, build_ernie)
SEED_OSS = Family(SeedOssConfig, build_seed_oss)
