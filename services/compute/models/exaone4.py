"""EXAONE 4 (LG, 2025): norms behind the blocks only; between windows, layers without positions."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class Exaone4Config(WindowedConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4  # or letters, L a window, G none, repeated

    def is_local(self, layer: int) -> bool:
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L"
        return pattern is not None and (layer + 1) % pattern != 0


def build(config: Exaone4Config, make: Builder[Any]) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def layer(at: str) -> Layer[Any]:
        turns = config.sliding_window is None or not make.span.is_full
        return SerialLayer(
            Sublayer(
                None,
                make.attention(f"{at}.self_attn", rope if turns else None, head_norm=norm),
                behind=make.norm(f"{at}.post_attention_layernorm", norm),
            ),
            Sublayer(
                None,
                make.gated_mlp(f"{at}.mlp"),
                behind=make.norm(f"{at}.post_feedforward_layernorm", norm),
            ),
        )

    return make.decoder(layer, norm)


EXAONE4 = Family(Exaone4Config, build)
