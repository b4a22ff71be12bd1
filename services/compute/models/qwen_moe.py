"""Qwen3's mixtures of experts (Alibaba, 2025)."""

from __future__ import annotations

from typing import Any, Literal

from services.compute.kernels.routing import Routing
from services.compute.layers.parts import LayerPart
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.pre_norm import build_pre_norm


class Qwen3MoeConfig(FamilyConfig):
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    use_sliding_window: Literal[False] = False
    attention_bias: bool = False
    norm_topk_prob: bool = False


def _build3(config: Qwen3MoeConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias
    mixture = make.mixture
    routing = Routing(mixture.num_experts, mixture.top_k, renormalised=config.norm_topk_prob)

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        if mixture.is_dense[number]:
            return make.gated_mlp(f"{at}.mlp")
        return make.experts(at, routing)

    return build_pre_norm(
        make,
        norm,
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias, head_norm=norm),
        feed_forward,
    )


QWEN3_MOE = Family(Qwen3MoeConfig, _build3)
