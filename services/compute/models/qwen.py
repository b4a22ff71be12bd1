"""Qwen2 and Qwen2.5 (Alibaba, 2024): biases in attention; Qwen3 (2025): norms of heads instead."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import build_serial


class Qwen2Config(WindowedConfig):
    rms_norm_eps: float = 1e-6
    use_sliding_window: bool = False
    max_window_layers: int = 28

    @property
    def local_span(self) -> AttentionSpan:
        return super().local_span if self.use_sliding_window else FULL

    def is_local(self, layer: int) -> bool:
        return layer >= self.max_window_layers


class Qwen3Config(Qwen2Config):
    attention_bias: bool = False


def build2(config: Qwen2Config, make: Builder[Any]) -> Decoder[Any]:
    rope = make.rope()
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope, qkv_bias=True),
        lambda at, number: make.gated_mlp(f"{at}.mlp"),
    )


def build3(config: Qwen3Config, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias
    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias, head_norm=norm),
        lambda at, number: make.gated_mlp(f"{at}.mlp"),
    )


QWEN2, QWEN3 = Family(Qwen2Config, build2), Family(Qwen3Config, build3)
