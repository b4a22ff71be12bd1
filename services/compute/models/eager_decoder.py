"""A decoder on the CPU, in plain torch.

Shape legend: T tokens, E hidden width, V vocabulary, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.layers.eager_step import EagerStep, RopeTables, StepMaker, normalised
from services.compute.layers.parts import Hidden
from services.compute.layers.step_attention import StepAttention
from services.compute.layers.weighted_layers import LinearMap
from services.compute.models.decoder import Decoder
from services.compute.models.draft_head import ModelEnds


class SeenStates:
    """What comes into some layers of a model, for who wants to see it; the number behind the last
    layer's is of what comes out of that."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._by_layer: dict[int, Tensor] = {}

    @property
    def states(self) -> list[Tensor]:
        """[T, E] of each layer that was asked for."""
        return self.of(self._layers)

    def of(self, layers: Sequence[int]) -> list[Tensor]:
        return [self._by_layer[layer] for layer in layers]

    def see(self, layer: int, x_TE: Tensor) -> None:
        if layer in self._layers:
            self._by_layer[layer] = x_TE.clone()  # layers add to it where it is


class EagerDecoder:
    """Runs a decoder, one operation after the other."""

    def __init__(
        self,
        decoder: Decoder[LinearMap],
        max_positions: int,
        ranks: Ranks = ALONE,
        context: Ranks = ALONE,
        make_step: StepMaker = EagerStep,
    ) -> None:
        """A part of the model is on each of the `ranks`; or, of those of the `context`, all of it,
        and they may share a step's tokens."""
        self._decoder = decoder
        self._ranks = ranks
        self._context = context
        self._make_step = make_step
        self._tables = RopeTables(decoder.mixers, max_positions, decoder.dtype)

    def forward(
        self,
        tokens_T: Tensor,
        attention: StepAttention,
        x_TE: Tensor | None = None,
        seen: SeenStates | None = None,
    ) -> Generator[bool, None, Tensor]:
        """Hidden states [T, E] after the last layer, not yet normalised; pauses after each, with
        more to compute. `x_TE` is what an earlier stage has made of the tokens."""
        step = self._make_step(tokens_T, attention, self._tables, self._ranks)
        hidden = step.embed(self._decoder.embedding) if x_TE is None else Hidden(x_TE)
        first = self._decoder.first_layer
        if seen is None:
            yield from step.through(self._decoder.layers, hidden)
            step.settle(hidden)
            return hidden.x_TE
        for number, layer in enumerate(self._decoder.layers, first):
            step.settle(hidden)
            seen.see(number, hidden.x_TE)
            layer(hidden, step)
            yield True
        step.settle(hidden)
        seen.see(first + len(self._decoder.layers), hidden.x_TE)
        return hidden.x_TE

    @property
    def expert_tokens(self) -> dict[int, Tensor]:
        return self._decoder.expert_tokens

    @property
    def has_head(self) -> bool:
        return self._decoder.has_head

    @property
    def ends(self) -> ModelEnds:
        """What a head that drafts for it shares with it."""
        decoder = self._decoder
        weight_VE = decoder.embedding.weight_VE
        return ModelEnds(decoder.shape, weight_VE, self.normed, self.logits_of_normed)

    def normed(self, x_SE: Tensor) -> Tensor:
        norm = self._decoder.norm
        return x_SE if norm is None else normalised(norm, x_SE)

    def logits(self, x_SE: Tensor) -> Tensor:
        """Float32 logits [S, V] of these hidden states; or of rank 0's, where other ranks may have
        others in the last bits."""
        return self.logits_of_normed(self._context.of_first(self.normed(x_SE)))

    def logits_of_normed(self, x_SE: Tensor) -> Tensor:
        decoder = self._decoder
        logits_SV = decoder.head(x_SE).float()
        logits_SV = self._ranks.side_by_side(logits_SV, decoder.shape.vocab_size)
        if decoder.logit_scale != 1.0:
            logits_SV.mul_(decoder.logit_scale)
        if decoder.logit_softcap:
            logits_SV.div_(decoder.logit_softcap).tanh_().mul_(decoder.logit_softcap)
        return logits_SV
