"""GLM-4 (Zhipu AI, 2024) and GLM-4-0414 (2025): half of a head rotates, in neighbouring pairs.

The second has norms behind its blocks, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import PRE_NORMS, NormNames, build_serial

ROPE = RopeDefaults(partial_rotary_factor=0.5, interleaved=True)
NORMS_AROUND = PRE_NORMS._replace(
    behind_mixer="post_self_attn_layernorm", behind_mlp="post_mlp_layernorm"
)


class GlmConfig(FamilyConfig):
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True


def build(config: GlmConfig, make: Builder[Any], norms: NormNames = PRE_NORMS) -> Decoder[Any]:
    rope = make.rope(defaults=ROPE)
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope, qkv_bias=config.attention_bias),
        lambda at, number: make.gated_mlp(f"{at}.mlp", merged=True),
        norms=norms,
    )


GLM, GLM4 = Family(GlmConfig, build), Family(GlmConfig, partial(build, norms=NORMS_AROUND))
