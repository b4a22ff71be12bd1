"""The layers behind a model's last one that predict further tokens (DeepSeek V3, 2024; GLM-4.5):
each is a layer of the model's kind over a map of two norms, of the token's embedding and of a
state. The first sees the model's state before the token, each further one that of the layer before
it (section 2.2 of DeepSeek's report).

What the norm behind a layer makes is its state, as SGLang has it; vLLM hands on what comes into it.

Shape legend: T tokens, E hidden width, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from services.compute.layers.parts import Hidden, Layer, Mixer, StepContext
from services.compute.layers.weighted_layers import Embedding, LinearMap, Norm
from services.compute.models.builder import Builder, NormForm
from services.compute.models.draft_head import (
    HeadEnding,
    ModelEnds,
    side_by_side,
)


@dataclass(frozen=True, slots=True, eq=False)
class NextTokenHead:
    embedding: Embedding
    token_norm: Norm
    state_norm: Norm
    join: LinearMap
    layer: Layer[LinearMap]
    norm: Norm
    head: LinearMap
    mixers: tuple[Mixer[LinearMap], ...]
    ends: ModelEnds

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.ends.shape.num_layers,)

    def kept(self, states: Sequence[Tensor]) -> Tensor:
        return self.ends.normed(states[0])

    @property
    def ending(self) -> HeadEnding:
        return HeadEnding(None, self.head)

    def forward(self, hidden: Hidden, x_TE: Tensor, step: StepContext[LinearMap]) -> None:
        norms = self.token_norm, self.state_norm
        hidden.x_TE.copy_(step.linear(side_by_side(hidden, x_TE, norms, step), self.join))
        self.layer(hidden, step)
        hidden.x_TE = step.computed(step.normed(hidden, self.norm))

    def logits(self, own_SE: Tensor) -> Tensor:
        return self.head(own_SE).float()


def build_next_token(
    ends: ModelEnds,
    make: Builder[LinearMap],
    make_layer: Callable[[str], Layer[LinearMap]],
    eps: float,
    number: int,
) -> NextTokenHead:
    """The layer of this number behind the model's last one, of the model's own files."""
    shape, norm = ends.shape, NormForm(eps)
    at = f"model.layers.{shape.num_layers + number}"
    width, head = shape.hidden_size, f"{at}.shared_head.head"
    return NextTokenHead(
        embedding=Embedding(ends.embedding_VE),
        token_norm=make.norm(f"{at}.enorm", norm),
        state_norm=make.norm(f"{at}.hnorm", norm),
        join=make.linear([f"{at}.eh_proj"], [width], 2 * width, bias=False),
        layer=make_layer(at),
        norm=make.norm(f"{at}.shared_head.norm", norm),
        head=make.linear([head], [shape.vocab_size], width, bias=False)
        if make.has(head)
        else ends.logits,
        mixers=make.mixers,
        ends=ends,
    )
