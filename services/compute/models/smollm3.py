"""SmolLM3 (Hugging Face, 2025): Llama, with layers that see no positions."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.parts import Attention
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig, rotates
from services.compute.models.serial_layers import build_serial


class SmolLM3Config(WindowedConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: list[int] | None = None  # 1: the layer rotates
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    @property
    def local_span(self) -> AttentionSpan:
        return super().local_span if self.use_sliding_window else FULL

    def is_local(self, layer: int) -> bool:
        return not self.rotates(layer)

    def rotates(self, layer: int) -> bool:
        return rotates(layer, self.no_rope_layers, self.no_rope_layer_interval)


def build(config: SmolLM3Config, make: Builder[Any]) -> Decoder[Any]:
    norm, bias = NormForm(config.rms_norm_eps), config.attention_bias
    rope = make.rope(defaults=RopeDefaults(theta=2_000_000.0))

    def attention(at: str) -> Attention[Any]:
        turns = config.rotates(make.layer_number)
        return make.attention(at, rope if turns else None, qkv_bias=bias, out_bias=bias)

    return build_serial(
        make,
        norm,
        attention,
        lambda at, number: make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias),
    )


SMOLLM3 = Family(SmolLM3Config, build)
