"""EXAONE 4 (LG, 2025): norms behind the blocks only; between windows, layers without positions."""

from __future__ import annotations

from typing import Any

from services.compute.layers.parts import Attention
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import POST_NORMS, build_serial


class Exaone4Config(WindowedConfig):
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

    def attention(at: str) -> Attention[Any]:
        turns = config.sliding_window is None or not make.span.is_full
        return make.attention(at, rope if turns else None, head_norm=norm)

    return build_serial(
        make,
        norm,
        attention,
        lambda at, number: make.gated_mlp(f"{at}.mlp"),
        norms=POST_NORMS,
    )


EXAONE4 = Family(Exaone4Config, build)
