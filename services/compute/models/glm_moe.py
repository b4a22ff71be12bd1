"""GLM-4.5 and 4.5-Air (Z.ai, 2025): half of a head rotates; experts are chosen in groups by their
sigmoids and a bias, and one sees all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import Layer, LayerPart
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import QWEN_STACKS
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.serial_layers import serial_layers


class GlmMoeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    num_nextn_predict_layers: int = Field(default=1, ge=0)


def build(config: GlmMoeConfig, make: Builder[Any]) -> Decoder[Any]:
    last, num_further = make.shape.num_layers, max(config.num_nextn_predict_layers, 1)
    make.skip(*[f"model.layers.{last + n}." for n in range(num_further)])  # predict further tokens
    return make.decoder(layers(config, make), NormForm(config.rms_norm_eps))


def layers(config: GlmMoeConfig, make: Builder[Any]) -> Callable[[str], Layer[Any]]:
    norm, mixture = NormForm(config.rms_norm_eps), make.mixture
    rope = make.rope(defaults=RopeDefaults(partial_rotary_factor=0.5))
    routing = Routing(
        mixture.num_experts,
        mixture.top_k,
        scores="sigmoid",
        renormalised=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        group_by="top2",
    )

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        mlp = f"{at}.mlp"
        if mixture.is_dense[number]:
            return make.gated_mlp(mlp)
        return make.experts(
            at,
            routing,
            choice_bias_X=make.float32(f"{mlp}.gate.e_score_correction_bias", routing.num_experts),
            shared=make.gated_mlp(f"{mlp}.shared_experts", width=mixture.shared_width),
        )

    return serial_layers(
        make,
        norm,
        lambda at: make.attention(
            at,
            rope,
            qkv_bias=config.attention_bias,
            head_norm=norm if config.use_qk_norm else None,
        ),
        feed_forward,
    )


GLM_MOE = Family(GlmMoeConfig, build, QWEN_STACKS, layers)
