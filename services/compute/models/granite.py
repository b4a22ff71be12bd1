"""Granite 3 (IBM, 2024): Llama with four multipliers; and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from services.compute.kernels.experts.routing import Routing
from services.compute.layers.parts import Experts, GatedMLP
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import ExpertModules
from services.compute.models.family import Family, FamilyConfig
from services.compute.models.safetensors_files import Stack
from services.compute.models.serial_layers import FeedForward, build_serial

MIXTURE = "block_sparse_moe"
EXPERTS = ExpertModules(
    router=f"{MIXTURE}.router.layer",
    gate_up=f"{MIXTURE}.experts.{{}}.input_linear",
    down=f"{MIXTURE}.experts.{{}}.output_linear",
)
STACKS = tuple(
    Stack(f".{MIXTURE}.{name}.weight", f".{MIXTURE}.experts.{{}}.{name}.weight")
    for name in ("input_linear", "output_linear")
)


class GraniteMoeConfig(FamilyConfig):
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteConfig(GraniteMoeConfig):
    mlp_bias: bool = False


def _build(config: GraniteMoeConfig, make: Builder[Any], feed_forward: FeedForward) -> Decoder[Any]:
    rope, bias = make.rope(), config.attention_bias
    return build_serial(
        make,
        NormForm(config.rms_norm_eps),
        lambda at: make.attention(
            at, rope, qkv_bias=bias, out_bias=bias, scale=config.attention_multiplier
        ),
        feed_forward,
        scale=config.residual_multiplier,
        embedding_scale=config.embedding_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


def build(config: GraniteConfig, make: Builder[Any]) -> Decoder[Any]:
    return _build(
        config, make, lambda at, number: make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias)
    )


def build_moe(config: GraniteMoeConfig, make: Builder[Any]) -> Decoder[Any]:
    mixture = make.mixture
    routing, width = Routing(mixture.num_experts, mixture.top_k), mixture.shared_width

    def shared(at: str) -> GatedMLP[Any] | None:
        if not width:
            return None
        if not make.has(f"{at}.shared_mlp.input_linear"):  # in GGUF files
            return make.gated_mlp(f"{at}.shared_mlp", width=width)
        mlp = f"{at}.shared_mlp"
        return make.gated_mlp_of([f"{mlp}.input_linear"], f"{mlp}.output_linear", width)

    def experts(at: str, number: int) -> Experts[Any]:
        return make.experts(at, routing, EXPERTS, shared=shared(at))

    return _build(config, make, experts)


GRANITE = Family(GraniteConfig, build)
GRANITE_MOE = Family(GraniteMoeConfig, build_moe, STACKS)
