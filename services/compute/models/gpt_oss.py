"""gpt-oss 20B and 120B (OpenAI, 2025): experts with biases and limits, attention with sinks.

Every second layer has a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import Attention, Experts
from services.compute.layers.rope import RopeDefaults
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import MODELOPT_SCALES, QWEN_EXPERTS
from services.compute.models.family import Family, WindowedConfig
from services.compute.models.safetensors_files import Stack
from services.compute.models.serial_layers import build_serial

EXPERTS = replace(QWEN_EXPERTS, router="mlp.router", have_bias=True, interleaved=True)
STACKS = tuple(
    Stack(f".experts.{name}{ending}", f".experts.{{}}.{name}.{each}", each.startswith("weight"))
    for name in ("gate_up_proj", "down_proj")
    for ending, each in (
        ("", "weight"),
        ("_bias", "bias"),
        ("_blocks", "blocks"),  # of MXFP4, not transposed
        ("_scales", "scales"),
        *MODELOPT_SCALES,
    )
)


class GptOssConfig(WindowedConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128

    def is_local(self, layer: int) -> bool:
        return layer % 2 == 0


def build(config: GptOssConfig, make: Builder[Any]) -> Decoder[Any]:
    rope, bias = make.rope(defaults=RopeDefaults(theta=150_000.0)), config.attention_bias
    # the softmax of the chosen experts' logits is that of all, renormalised
    routing = Routing(make.mixture.num_experts, make.mixture.top_k)

    def attention(at: str) -> Attention[Any]:
        sinks_H = make.sinks(f"{at}.sinks")
        return make.attention(at, rope, qkv_bias=bias, out_bias=bias, sinks_H=sinks_H)

    def experts(at: str, number: int) -> Experts[Any]:
        return make.experts(at, routing, EXPERTS, gating="swiglu_oai")

    norm = NormForm(config.rms_norm_eps, round_first=False)
    return build_serial(make, norm, attention, experts)


GPT_OSS = Family(GptOssConfig, build, STACKS)
