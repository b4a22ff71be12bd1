"""Qwen's mixtures of experts: Qwen2-MoE (Alibaba, 2024), where a gated expert sees all tokens, and
Qwen3-MoE (2025), which has none."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import LayerPart
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_STACKS
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import FeedForward, build_serial


class QwenMoeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = False


class Qwen2MoeConfig(QwenMoeConfig):
    qkv_bias: bool = True


class Qwen3MoeConfig(QwenMoeConfig):
    attention_bias: bool = False


def _feed_forward(config: QwenMoeConfig, make: Builder[Any], has_shared: bool) -> FeedForward:
    mixture = make.mixture
    routing = Routing(mixture.num_experts, mixture.top_k, renormalised=config.norm_topk_prob)

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        mlp = f"{at}.mlp"
        if mixture.is_dense[number]:
            return make.gated_mlp(mlp)
        if not has_shared:
            return make.experts(at, routing)
        return make.experts(
            at,
            routing,
            shared=make.gated_mlp(f"{mlp}.shared_expert", width=mixture.shared_width),
            shared_gate=make.router(f"{mlp}.shared_expert_gate", 1),
        )

    return feed_forward


def build2(config: Qwen2MoeConfig, make: Builder[Any]) -> Decoder[Any]:
    rope = make.rope()
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope, qkv_bias=config.qkv_bias),
        _feed_forward(config, make, has_shared=True),
    )


def build3(config: Qwen3MoeConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias
    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias, head_norm=norm),
        _feed_forward(config, make, has_shared=False),
    )


QWEN2_MOE = Family(Qwen2MoeConfig, build2, QWEN_STACKS)
QWEN3_MOE = Family(Qwen3MoeConfig, build3, QWEN_STACKS)
