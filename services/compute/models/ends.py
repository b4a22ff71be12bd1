"""What is before a model's layers and behind them, embedding and head: each of a stage of its own.

Shape legend: E hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.distributed.shard import Shard
from services.compute.layers.weighted_layers import Embedding
from services.compute.models.weights import WeightSource
from services.compute.quantization.packed import UNCUT, Cut, Weight


@dataclass(frozen=True, slots=True)
class TopNames:
    """Names of the tensors, and of the layers, that are not in a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA_NAMES = TopNames()
NAMES_BESIDE_IMAGES = TopNames(
    embedding="language_model.model.embed_tokens",
    layers="language_model.model.layers",
    norm="language_model.model.norm",
    head="language_model.lm_head",
)


@dataclass(frozen=True, slots=True)
class Ends:
    """Takes them from a checkpoint, for a rank of a stage; a head that is tied to the embedding
    makes it one of two stages."""

    weights: WeightSource
    shape: DecoderShape
    shard: Shard
    names: TopNames
    needs_head: bool

    @property
    def _has_head(self) -> bool:
        """Whether the model has one, on whatever stage."""
        tied = self.shape.tie_word_embeddings
        return self.needs_head or tied or self.weights.has(self.names.head)

    @property
    def _size(self) -> tuple[int, int]:
        return self.shape.vocab_size, self.shape.hidden_size

    def embedding(self, scale: float) -> Embedding:
        """Where it is neither looked up nor the head, or in its place, it has no rows."""
        weights, name = self.weights, self.names.embedding
        is_head = self.shape.tie_word_embeddings or not self._has_head
        if self.shard.is_first or (self.shard.is_last and (is_head or self.shard.has_head)):
            return Embedding(weights.take(f"{name}.weight", self._size), scale)
        weights.skip(f"{name}.")
        none_0E = torch.empty((0, self._size[1]), dtype=weights.dtype, device=weights.device)
        return Embedding(none_0E, scale)

    def head(
        self, embedding: Embedding, has_bias: bool
    ) -> tuple[Weight, Tensor | None, Tensor | None] | None:
        """Its weight, its bias, and its numbers where the embedding has them; None where it is
        another stage's, or missing and not needed."""
        weights, name = self.weights, self.names.head
        if not self.shard.is_last:
            weights.skip(f"{name}.")
            return None
        if not self._has_head:
            return None
        part, bias_V = self.shard.part(self._size[0]), None
        if has_bias:
            bias_V = weights.stack([f"{name}.bias"], self._size[:1])[part.start : part.stop]
        cut = UNCUT if len(part) == self._size[0] else Cut(torch.tensor(part))
        if self.shape.tie_word_embeddings:
            weights.skip(f"{name}.")
            rows_VE = embedding.weight_VE[part.start : part.stop]
            head = weights.tied_head(self.names.embedding, self._size, cut, rows_VE)
            return head, bias_V, rows_VE
        return weights.head(name, self._size, cut), bias_V, None
