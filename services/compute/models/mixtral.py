"""Mixtral 8x7B and 8x22B (Mistral AI, 2023 and 2024): Mistral with experts."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import MIXTRAL_EXPERTS
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.serial_layers import build_serial


class MixtralConfig(WindowedConfig):
    rms_norm_eps: float = 1e-5


def build(config: MixtralConfig, make: Builder[Any]) -> Decoder[Any]:
    rope = make.rope(defaults=RopeDefaults(theta=1_000_000.0))
    routing = Routing(make.mixture.num_experts, make.mixture.top_k)
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope),
        lambda at, number: make.experts(at, routing, MIXTRAL_EXPERTS),
    )


MIXTRAL = Family(MixtralConfig, build)
