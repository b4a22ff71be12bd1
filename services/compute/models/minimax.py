"""MiniMax-M2 (MiniMax, 2025): norms of all heads together, part of a head rotates, and experts are
chosen by their sigmoids and a bias."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import Experts
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import MIXTRAL_EXPERTS
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import build_serial


class MiniMaxConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6


def build(config: MiniMaxConfig, make: Builder[Any]) -> Decoder[Any]:
    norm = NormForm(config.rms_norm_eps)
    rope = make.rope(defaults=RopeDefaults(theta=5_000_000.0))
    routing = Routing(make.mixture.num_experts, make.mixture.top_k, scores="sigmoid")

    def experts(at: str, number: int) -> Experts[Any]:
        bias = f"{at}.block_sparse_moe.e_score_correction_bias"
        return make.experts(
            at,
            routing,
            MIXTRAL_EXPERTS,
            choice_bias_X=make.float32(bias, routing.num_experts),
        )

    return build_serial(
        make,
        norm,
        lambda at: make.attention(at, rope, **make.norms_of_all_heads(at, norm, rope)),
        experts,
    )


MINIMAX = Family(MiniMaxConfig, build)
