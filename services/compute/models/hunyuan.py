"""Hunyuan (Tencent, 2025), dense and A13B: norms of heads after the rotation."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import Attention
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_STACKS, ExpertModules
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import FeedForward, build_serial

EXPERTS = ExpertModules(router="mlp.gate.wg")


class HunyuanConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def _build(config: HunyuanConfig, make: Builder[Any], feed_forward: FeedForward) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias

    def attention(at: str) -> Attention[Any]:
        return make.attention(
            at,
            rope,
            qkv_bias=bias,
            out_bias=bias,
            q_norm=make.head_norm(f"{at}.query_layernorm", norm, rope),
            k_norm=make.head_norm(f"{at}.key_layernorm", norm, rope),
            norms_rotated=True,
        )

    return build_serial(make, norm, attention, feed_forward)


def build(config: HunyuanConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, lambda at, number: make.gated_mlp(f"{at}.mlp"))


def build_moe(config: HunyuanConfig, make: Builder[Any]) -> Decoder[Any]:
    mixture = make.mixture
    routing = Routing(mixture.num_experts, mixture.top_k)
    return _build(
        config,
        make,
        lambda at, number: make.experts(
            at,
            routing,
            EXPERTS,
            shared=make.gated_mlp(f"{at}.mlp.shared_mlp", width=mixture.shared_width),
        ),
    )


HUNYUAN = Family(HunyuanConfig, build)
HUNYUAN_MOE = Family(HunyuanConfig, build_moe, QWEN_STACKS)
