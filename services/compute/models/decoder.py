"""A decoder-only language model: embedding, layers, norm and head, and the pass over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.layers.parts import Experts, Hidden, Layer, Mixer, StepContext
from services.compute.layers.weighted_layers import Embedding, Norm

L = TypeVar("L")


@dataclass(frozen=True, slots=True, eq=False)
class Decoder(Generic[L]):
    """The weights on one device; how its linear maps multiply is the device's."""

    shape: DecoderShape
    embedding: Embedding
    layers: tuple[Layer[L], ...]
    mixers: tuple[Mixer[L], ...]  # of the layers, in their order
    linears: tuple[L, ...]  # all of them, as they were made
    norm: Norm | None  # None: what the layers leave is normed already, as some heads' that draft
    head: L
    has_head: bool = True  # False: `head` only stands in its place, as it makes no text
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    first_layer: int = 0  # its number in the model, of which this may be a stage

    @property
    def device(self) -> torch.device:
        return self.embedding.weight_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight_VE.dtype

    @property
    def mixtures(self) -> dict[int, Experts[L]]:
        """By the layers that have experts."""
        parts = [layer.parts[1] for layer in self.layers]
        numbered = enumerate(parts, self.first_layer)
        return {number: part for number, part in numbered if isinstance(part, Experts)}

    @property
    def expert_tokens(self) -> dict[int, Tensor]:
        """How many tokens each expert was given (int64 [X]), by the layers that count them."""
        return {
            number: part.tokens_X
            for number, part in self.mixtures.items()
            if part.tokens_X is not None
        }

    @property
    def leaves_whole(self) -> bool:
        """Whether what the last part has added is wanted in the stream behind a pass."""
        return False

    @property
    def is_first(self) -> bool:
        """Whether it begins with tokens, not with what another stage has made of them."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether logits are made of its result."""
        return self.first_layer + len(self.layers) == self.shape.num_layers

    def forward(self, hidden: Hidden, step: StepContext[L]) -> None:
        """Take the residual stream through all layers; it is not yet normalised then."""
        for layer in self.layers:
            layer(hidden, step)
