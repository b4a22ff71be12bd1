"""ERNIE 4.5's mixtures of experts (Baidu, 2025): neighbouring pairs rotate; experts are chosen with
a bias, and some see all tokens."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from services.compute.kernels.experts.routing import SMALLEST_SUM, Routing
from services.compute.layers.parts import GatedMLP, LayerPart
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_STACKS
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import build_serial


class ErnieMoeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    moe_norm_min: float = Field(1e-12, ge=SMALLEST_SUM, le=1e-9)  # no sum of shares is so small


def build(config: ErnieMoeConfig, make: Builder[Any]) -> Decoder[Any]:
    bias, mixture = config.use_bias, make.mixture
    rope = make.rope(defaults=RopeDefaults(theta=500_000.0, interleaved=True))
    make.skip("model.mtp_")  # predicts a second token
    routing = Routing(mixture.num_experts, mixture.top_k)

    def shared(mlp: str) -> GatedMLP[Any] | None:
        width = mixture.shared_width
        return make.gated_mlp(f"{mlp}.shared_experts", bias=bias, width=width) if width else None

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        mlp = f"{at}.mlp"
        if mixture.is_dense[number]:
            return make.gated_mlp(mlp, bias=bias)
        choice_bias = f"{mlp}.moe_statics.e_score_correction_bias"
        return make.experts(
            at,
            routing,
            choice_bias_X=make.float32(choice_bias, 1, routing.num_experts).flatten(),
            shared=shared(mlp),
        )

    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(at, rope, qkv_bias=bias, out_bias=bias),
        feed_forward,
        head_bias=bias,
    )


ERNIE_MOE = Family(ErnieMoeConfig, build, QWEN_STACKS)
