"""Phi-3.5-MoE (Microsoft, 2024): layer norms, biases, and experts that are mixed sparsely."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import MIXTRAL_EXPERTS
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import build_serial


class PhiMoeConfig(WindowedConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    lm_head_bias: bool = False
    router_jitter_noise: float = 0.01


def build(config: PhiMoeConfig, make: Builder[Any]) -> Decoder[Any]:
    bias, rope = config.attention_bias, make.rope(defaults=RopeDefaults(theta=1_000_000.0))
    routing = Routing(
        make.mixture.num_experts,
        make.mixture.top_k,
        scores="sparsemixer",
        renormalised=False,
        tolerance=2 * config.router_jitter_noise,
    )
    return build_serial(
        make,
        NormForm(config.rms_norm_eps, "layer", has_bias=True),
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias),
        lambda at, number: make.experts(at, routing, MIXTRAL_EXPERTS),
        head_bias=config.lm_head_bias,
    )


PHI_MOE = Family(PhiMoeConfig, build)
