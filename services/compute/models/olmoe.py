"""OLMoE (Ai2, 2024): Llama with experts, and norms of all heads together."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_STACKS
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import build_serial


class OlmoeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    norm_topk_prob: bool = False


def build(config: OlmoeConfig, make: Builder[Any]) -> Decoder[Any]:
    norm, rope, bias = NormForm(config.rms_norm_eps), make.rope(), config.attention_bias
    mixture = make.mixture
    routing = Routing(mixture.num_experts, mixture.top_k, renormalised=config.norm_topk_prob)
    return build_serial(
        make,
        norm,
        lambda at: make.attention(
            at, rope, qkv_bias=bias, out_bias=bias, **make.norms_of_all_heads(at, norm, rope)
        ),
        lambda at, number: make.experts(at, routing),
    )


OLMOE = Family(OlmoeConfig, build, QWEN_STACKS)
