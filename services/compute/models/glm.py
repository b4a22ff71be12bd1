"""GLM-4 (Zhipu AI, 2024) and GLM-4-0414 (2025): half of a head rotates, in neighbouring pairs.

The second has norms behind its blocks, too.
"""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig

ROPE = RopeDefaults(partial_rotary_factor=0.5, interleaved=True)


class GlmConfig(FamilyConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True


def _build(config: GlmConfig, make: Builder[Any], behind: bool) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope(defaults=ROPE)

    def layer(at: str) -> Layer[Any]:
        names = [f"{at}.post_self_attn_layernorm", f"{at}.post_mlp_layernorm"]
        after = [make.norm(name, norm) if behind else None for name in names]
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(f"{at}.self_attn", rope, qkv_bias=config.attention_bias),
                behind=after[0],
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", merged=True),
                behind=after[1],
            ),
        )

    return make.decoder(layer, norm)


def build(config: GlmConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, behind=False)


def build4(config: GlmConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, behind=True)


GLM, GLM4 = Family(GlmConfig, build), Family(GlmConfig, build4)
