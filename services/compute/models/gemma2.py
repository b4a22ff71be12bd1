"""Gemma 2 (Google, 2024): as Gemma 1, with norms behind the blocks too, and capped scores.

Every second layer has a window.
"""

from __future__ import annotations

from typing import Any

from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import PLAIN_ROPE, Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.ends import LLAMA_NAMES, TopNames
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import NormNames, build_serial

NORMS = NormNames(
    before_mixer="input_layernorm",
    behind_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
)


class Gemma2Config(WindowedConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: int | None = 4096

    def is_local(self, layer: int) -> bool:
        return layer % 2 == 0


def build(
    config: Gemma2Config,
    make: Builder[Any],
    rope: RopeDefaults = PLAIN_ROPE,
    has_head_norms: bool = False,
    names: TopNames = LLAMA_NAMES,
) -> Decoder[Any]:
    """Gemma 3 comes as the other arguments say."""
    norm = NormForm(config.rms_norm_eps, plus_one=True, round_first=False)
    bias = config.attention_bias
    ropes = {kind: make.rope(kind, rope) for kind in ("full_attention", "sliding_attention")}
    return build_serial(
        make,
        norm,
        lambda at: make.attention(
            at,
            ropes[make.layer_type],
            qkv_bias=bias,
            out_bias=bias,
            head_norm=norm if has_head_norms else None,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping or 0.0,
        ),
        lambda at, number: make.gated_mlp(f"{at}.mlp", activation="gelu_tanh"),
        norms=NORMS,
        names=names,
        embedding_scale=make.rounded(make.shape.hidden_size**0.5),
        logit_softcap=config.final_logit_softcapping or 0.0,
    )


GEMMA2 = Family(Gemma2Config, build)
