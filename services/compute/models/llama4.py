"""Llama 4 Scout and Maverick (Meta, 2025), their text: experts whose inputs are scaled, norms
without weights after the rotation, and layers that see no positions.

Layers that rotate attend within chunks of 8,192 tokens, and queries of the others grow with their
position from there on.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveInt

from services.compute.kernels.experts.routing import Routing
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.parts import (
    Layer,
    LayerPart,
    SerialLayer,
    Sublayer,
    Temperature,
)
from services.compute.layers.rope import RopeDefaults
from services.compute.layers.weighted_layers import Norm
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder
from services.compute.models.ends import LLAMA_NAMES, NAMES_BESIDE_IMAGES, TopNames
from services.compute.models.expert_tensors import MODELOPT_SCALES, ExpertModules
from services.compute.models.family import Family, LocalConfig, rotates
from services.compute.models.safetensors_files import Stack

EXPERTS = ExpertModules(
    router="feed_forward.router",
    gate="feed_forward.experts.{}.gate_proj",
    up="feed_forward.experts.{}.up_proj",
    gate_up="feed_forward.experts.{}.gate_up_proj",
    down="feed_forward.experts.{}.down_proj",
)
STACKS = tuple(
    Stack(f".experts.{name}{ending}", f".experts.{{}}.{name}.{each}", transposed=True)
    for name in ("gate_up_proj", "down_proj")
    for ending, each in (("", "weight"), *MODELOPT_SCALES)
)


class Llama4Config(LocalConfig):
    local_type: ClassVar[str] = "chunked_attention"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None  # 1: the layer rotates
    no_rope_layer_interval: int = 4
    attention_chunk_size: PositiveInt | None = 8192
    attn_temperature_tuning: bool | int = True  # Meta's files have a 4
    floor_scale: PositiveInt = 8192
    attn_scale: float = 0.1

    @property
    def local_span(self) -> AttentionSpan:
        return AttentionSpan.chunk(self.attention_chunk_size) if self.attention_chunk_size else FULL

    @property
    def temperature(self) -> Temperature | None:
        """Of layers that see no positions."""
        tuned = self.attn_temperature_tuning
        return Temperature(self.floor_scale, self.attn_scale) if tuned else None

    def is_local(self, layer: int) -> bool:
        return self.rotates(layer)

    def rotates(self, layer: int) -> bool:
        return rotates(layer, self.no_rope_layers, self.no_rope_layer_interval)


def build(config: Llama4Config, make: Builder[Any], names: TopNames = LLAMA_NAMES) -> Decoder[Any]:
    norm, bias, mixture = NormForm(config.rms_norm_eps), config.attention_bias, make.mixture
    rope = make.rope(defaults=RopeDefaults(theta=500_000.0, interleaved=True))
    routing = Routing(mixture.num_experts, mixture.top_k, "sigmoid", renormalised=False)

    def feed_forward(at: str, number: int) -> LayerPart[Any]:
        if mixture.is_dense[number]:
            return make.gated_mlp(f"{at}.feed_forward")
        shared = make.gated_mlp(f"{at}.feed_forward.shared_expert", width=mixture.shared_width)
        return make.experts(at, routing, EXPERTS, shared=shared, scales_input=True)

    def layer(at: str) -> Layer[Any]:
        number = make.layer_number
        turns = config.rotates(number)
        before = make.norm(f"{at}.input_layernorm", norm)
        heads = None
        if turns and config.use_qk_norm:
            heads = Norm(before.weight_E.new_ones(make.shape.head_dim), config.rms_norm_eps)
        attention = make.attention(
            f"{at}.self_attn",
            rope if turns else None,
            qkv_bias=bias,
            out_bias=bias,
            q_norm=heads,
            k_norm=heads,
            norms_rotated=True,
            temperature=None if turns else config.temperature,
        )
        return SerialLayer(
            Sublayer(before, attention),
            Sublayer(make.norm(f"{at}.post_attention_layernorm", norm), feed_forward(at, number)),
        )

    return make.decoder(layer, norm, names)


def build_beside_images(config: Llama4Config, make: Builder[Any]) -> Decoder[Any]:
    """The text model of one that sees: its other parts stay in the files."""
    make.skip("vision_model.", "multi_modal_projector.")
    return build(config, make, NAMES_BESIDE_IMAGES)


LLAMA4 = Family(Llama4Config, build, STACKS)
LLAMA4_IMAGES = Family(Llama4Config, build_beside_images, STACKS)
