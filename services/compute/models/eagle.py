"""EAGLE and EAGLE-2 (Li et al., 2024), which have the same head: a layer without a norm before its
attention, over a map of the token's embedding and the model's last state. It makes such a state,
which the model's own head makes tokens of.

Shape legend: T tokens, E hidden width, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.compute.layers.parts import Hidden, Mixer, SerialLayer, StepContext, Sublayer
from services.compute.layers.weighted_layers import Embedding, LinearMap
from services.compute.models.builder import NormForm
from services.compute.models.draft_head import (
    HeadEnding,
    HeadSource,
    ModelEnds,
    side_by_side,
)
from services.compute.models.llama import LlamaConfig


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    embedding: Embedding
    join: LinearMap
    layer: SerialLayer[LinearMap]
    mixers: tuple[Mixer[LinearMap], ...]
    ends: ModelEnds

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.ends.shape.num_layers,)

    def kept(self, states: Sequence[Tensor]) -> Tensor:
        return self.ends.normed(states[0])

    @property
    def ending(self) -> HeadEnding:
        return HeadEnding(None, self.ends.logits)

    def forward(self, hidden: Hidden, x_TE: Tensor, step: StepContext[LinearMap]) -> None:
        hidden.x_TE.copy_(step.linear(side_by_side(hidden, x_TE, None, step), self.join))
        self.layer(hidden, step)

    def logits(self, own_SE: Tensor) -> Tensor:
        return self.ends.logits(own_SE)


def build_eagle(source: HeadSource) -> EagleHead:
    config = LlamaConfig.read(source.raw)
    make, width = source.builder(), source.shape.hidden_size
    fc = source.prefix("fc") + "fc"
    top = source.prefix("layers.0.mlp.up_proj")  # another one in vLLM's older folders
    at = f"{top}layers.0"
    norm, bias = NormForm(config.rms_norm_eps), config.attention_bias
    before = f"{at}.input_layernorm"
    qkv_bias = bias or source.has(f"{at}.self_attn.q_proj.bias")  # as heads for Qwen2 have one
    attention = make.attention(f"{at}.self_attn", make.rope(), qkv_bias=qkv_bias, out_bias=bias)
    made = EagleHead(
        embedding=source.embedding(f"{top}embed_tokens"),
        join=make.linear([fc], [width], 2 * width, source.has(f"{fc}.bias")),
        layer=SerialLayer(
            Sublayer(make.norm(before, norm) if make.has(before) else None, attention),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias),
            ),
        ),
        mixers=(attention,),
        ends=source.ends,
    )
    make.skip("lm_head.")  # a copy of the model's
    source.weights.finish()
    return made
