"""The layer behind a model's last one that predicts a second token (DeepSeek V3, 2024; GLM-4.5): a
layer of the model's kind over a map of two norms, of the token's embedding and of the last state.

What the norm behind it makes is the state that the next draft is made of, as SGLang and vLLM have
it. Only the first such layer is read; it is used for each draft.

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
    HeadSource,
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
    source: HeadSource,
    make: Builder[LinearMap],
    make_layer: Callable[[str], Layer[LinearMap]],
    eps: float,
) -> NextTokenHead:
    """Of the model's own files, whose other tensors are left."""
    ends, norm = source.ends, NormForm(eps)
    shape, at = ends.shape, f"model.layers.{ends.shape.num_layers}"
    width, head = shape.hidden_size, f"{at}.shared_head.head"
    made = NextTokenHead(
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
    make.skip("")
    source.weights.finish()
    return made
