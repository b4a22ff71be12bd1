"""Gemma 2 and 3 (Google, 2024 and 2025), their text: as Gemma 1, with norms behind the blocks too.

Gemma 2 caps its scores, and every second layer has a window. Gemma 3 has norms of heads in place of
the caps, and five windows before each full layer, with a rotation of their own.
"""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import LLAMA_NAMES, Builder, NormForm, TopNames
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class Gemma2Config(WindowedConfig):
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: int | None = 4096

    def has_window(self, layer: int) -> bool:
        return layer % 2 == 0


class Gemma3Config(Gemma2Config):
    attn_logit_softcapping: None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: Literal[False] = False
    sliding_window_pattern: int = 6

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0


IN_GEMMA3_IMAGES = TopNames(
    embedding="language_model.model.embed_tokens",
    layers="language_model.model.layers",
    norm="language_model.model.norm",
    head="language_model.lm_head",
)
GEMMA3_ROPE = RopeDefaults(theta=1_000_000.0, window_theta=10_000.0, scales_windows=False)


def _norm(config: Gemma2Config) -> NormForm:
    return NormForm(config.rms_norm_eps, plus_one=True, round_first=False)


def _build23(
    config: Gemma2Config,
    make: Builder[Any],
    head_norm: NormForm | None,
    names: TopNames = LLAMA_NAMES,
) -> Decoder[Any]:
    norm, bias = _norm(config), config.attention_bias
    ropes = {
        kind: make.rope(kind, GEMMA3_ROPE if head_norm else RopeDefaults())
        for kind in ("full_attention", "sliding_attention")
    }

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(
                    f"{at}.self_attn",
                    ropes[make.layer_type],
                    qkv_bias=bias,
                    out_bias=bias,
                    head_norm=head_norm,
                    scale=config.query_pre_attn_scalar**-0.5,
                    softcap=config.attn_logit_softcapping or 0.0,
                ),
                behind=make.norm(f"{at}.post_attention_layernorm", norm),
            ),
            Sublayer(
                make.norm(f"{at}.pre_feedforward_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", activation="gelu_tanh"),
                behind=make.norm(f"{at}.post_feedforward_layernorm", norm),
            ),
        )

    return make.decoder(
        layer,
        norm,
        names,
        embedding_scale=make.rounded(make.shape.hidden_size**0.5),
        logit_softcap=config.final_logit_softcapping or 0.0,
    )


def build2(config: Gemma2Config, make: Builder[Any]) -> Decoder[Any]:
    return _build23(config, make, head_norm=None)


def build3(config: Gemma3Config, make: Builder[Any]) -> Decoder[Any]:
    return _build23(config, make, head_norm=_norm(config))


def build3_images(config: Gemma3Config, make: Builder[Any]) -> Decoder[Any]:
    """The text model of one that sees: its other parts stay in the files."""
    make.skip("vision_tower.", "multi_modal_projector.")
    return _build23(config, make, _norm(config), IN_GEMMA3_IMAGES)


GEMMA2 = Family(Gemma2Config, build2)
GEMMA3, GEMMA3_IMAGES = Family(Gemma3Config, build3), Family(Gemma3Config, build3_images)
