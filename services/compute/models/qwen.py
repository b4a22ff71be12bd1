"""Qwen2 and Qwen2.5 (Alibaba, 2024): biases in attention; Qwen3 (2025): norms of heads instead."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.kernels.span import FULL, AttentionSpan
from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, WindowedConfig


class Qwen2Config(WindowedConfig):
    hidden_act: Literal["silu"] = "silu"
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


def _build(
    config: Qwen2Config, make: Builder[Any], qkv_bias: bool, out_bias: bool, has_head_norms: bool
) -> Decoder[Any]:
    norm, rope = NormForm(config.rms_norm_eps), make.rope()

    def layer(at: str) -> Layer[Any]:
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm),
                make.attention(
                    f"{at}.self_attn",
                    rope,
                    qkv_bias=qkv_bias,
                    out_bias=out_bias,
                    head_norm=norm if has_head_norms else None,
                ),
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp"),
            ),
        )

    return make.decoder(layer, norm)


def _build2(config: Qwen2Config, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, qkv_bias=True, out_bias=False, has_head_norms=False)


def _build3(config: Qwen3Config, make: Builder[Any]) -> Decoder[Any]:
    bias = config.attention_bias
    return _build(config, make, qkv_bias=bias, out_bias=bias, has_head_norms=True)


QWEN2 = Family(Qwen2Config, _build2)
QWEN3 = Family(Qwen3Config, _build3)
