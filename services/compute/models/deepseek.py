"""DeepSeek V2 and V3 (2024), R1 (2025), and Kimi K2 (Moonshot AI, 2025): latent attention, and
mixtures of experts behind the first layers.

What a checkpoint has for predicting several tokens at once, in layers behind the last one, is read
where it is to draft (`next_token.py`).
"""

from __future__ import annotations

import math
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
from services.compute.models.latent import latent_attention
from services.compute.models.serial_layers import serial_layers


class DeepseekConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = Field(default=0, ge=0)


class DeepseekV2Config(DeepseekConfig):
    topk_method: str = "greedy"
    norm_topk_prob: bool = False


class DeepseekV3Config(DeepseekConfig):
    norm_topk_prob: bool = True
    n_group: int | None = 8
    topk_group: int | None = 4
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True


def _build(
    config: DeepseekConfig, make: Builder[Any], layers: Callable[[str], Layer[Any]]
) -> Decoder[Any]:
    last = make.shape.num_layers
    make.skip(*[f"model.layers.{last + n}." for n in range(config.num_nextn_predict_layers)])
    return make.decoder(layers, NormForm(config.rms_norm_eps))


def _layers(
    config: DeepseekConfig,
    make: Builder[Any],
    routing: Routing,
    interleaved: bool = True,
    has_bias: bool = False,
) -> Callable[[str], Layer[Any]]:
    mixture, latent = make.mixture, make.shape.latent
    if latent is None:
        raise ValueError("a family of latent attention has the sizes of latents")
    rope = make.rope(defaults=RopeDefaults(interleaved=interleaved))
    scale = latent.query_dim**-0.5 * _magnitude(make) ** 2

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        if mixture.is_dense[number]:
            return make.gated_mlp(f"{at}.mlp")
        shared = None
        if mixture.shared_width:
            shared = make.gated_mlp(f"{at}.mlp.shared_experts", width=mixture.shared_width)
        bias_X = None
        if has_bias:
            name = f"{at}.mlp.gate.e_score_correction_bias"
            bias_X = make.float32(name, mixture.num_experts)
        return make.experts(at, routing, choice_bias_X=bias_X, shared=shared)

    return serial_layers(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: latent_attention(make, at, latent, rope, scale),
        feed_forward,
    )


def _magnitude(make: Builder[Any]) -> float:
    """What YaRN makes of the dot products of queries and keys, whose rotated part alone has it by
    the rotation."""
    scaling = make.raw.get("rope_parameters") or make.raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor") or 1.0
    if kind == "default" or not weight or factor <= 1:
        return 1.0
    return 0.1 * float(weight) * math.log(factor) + 1.0


def _groups(config: DeepseekConfig) -> tuple[int, int]:
    """How many groups of experts there are, and how many of them a token sees."""
    return config.n_group or 1, config.topk_group or config.n_group or 1


def _build_v2(config: DeepseekV2Config, make: Builder[Any]) -> Decoder[Any]:
    is_limited = config.topk_method == "group_limited_greedy"
    num_groups, num_top = _groups(config) if is_limited else (1, 1)
    routing = Routing(
        make.mixture.num_experts,
        make.mixture.top_k,
        renormalised=False,
        scale=config.routed_scaling_factor,
        num_groups=num_groups,
        top_groups=num_top,
    )
    return _build(config, make, _layers(config, make, routing))


def _layers_v3(config: DeepseekV3Config, make: Builder[Any]) -> Callable[[str], Layer[Any]]:
    num_groups, num_top = _groups(config)
    routing = Routing(
        make.mixture.num_experts,
        make.mixture.top_k,
        scores="sigmoid",
        renormalised=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        num_groups=num_groups,
        top_groups=num_top,
        group_by="top2",
    )
    return _layers(config, make, routing, config.rope_interleave, has_bias=True)


def _build_v3(config: DeepseekV3Config, make: Builder[Any]) -> Decoder[Any]:
    return _build(config, make, _layers_v3(config, make))


DEEPSEEK_V2 = Family(DeepseekV2Config, _build_v2, QWEN_STACKS)
DEEPSEEK_V3 = Family(DeepseekV3Config, _build_v3, QWEN_STACKS, _layers_v3)
