"""Command-R and Command-R7B (Cohere, 2024): attention and MLP side by side, scaled logits.

Command-R7B has windows in three of four layers, and no positions in the fourth.
"""

from __future__ import annotations

from typing import Any

from services.compute.kernels.step.span import AttentionSpan
from services.compute.layers.parts import Layer, ParallelLayer
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig, WindowedConfig


class CohereConfig(FamilyConfig):
    layer_norm_eps: float = 1e-5
    attention_bias: bool = False
    logit_scale: float = 0.0625
    use_qk_norm: bool = False

    @property
    def rope(self) -> RopeDefaults:
        return RopeDefaults(theta=500_000.0, interleaved=True)

    def rotates(self, span: AttentionSpan) -> bool:
        return True


class Cohere2Config(WindowedConfig, CohereConfig):
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4

    def is_local(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    @property
    def rope(self) -> RopeDefaults:
        return RopeDefaults(interleaved=True)

    def rotates(self, span: AttentionSpan) -> bool:
        return not span.is_full


def build(config: CohereConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.layer_norm_eps, kind="layer", round_first=False)
    rope, bias = make.rope(defaults=config.rope), config.attention_bias

    def layer(at: str) -> Layer[Any]:
        turn = rope if config.rotates(make.span) else None
        self_attn = f"{at}.self_attn"
        norms: dict[str, Any] = {}
        if config.use_qk_norm:
            norms = make.norms_of_all_heads(self_attn, norm, turn, together=False)
        return ParallelLayer(
            make.norm(f"{at}.input_layernorm", norm),
            make.attention(self_attn, turn, qkv_bias=bias, out_bias=bias, **norms),
            make.gated_mlp(f"{at}.mlp"),
        )

    return make.decoder(layer, norm, logit_scale=config.logit_scale)


COHERE, COHERE2 = Family(CohereConfig, build), Family(Cohere2Config, build)
