"""Heads that guess what a model says from its hidden states. Variants are files: `eagle3`, `eagle`,
`next_token`, and `medusa`, whose heads keep nothing of a text.

Shape legend: T tokens, E hidden width, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.kernels.step.span import BEHIND_FIRST
from services.compute.layers.parts import Hidden, Layer, Mixer, StepContext
from services.compute.layers.weighted_layers import Embedding, LinearMaker, LinearMap, Norm
from services.compute.models.builder import Builder
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import WeightSource


class ModelEnds(NamedTuple):
    """What a head shares with the model that it drafts for."""

    shape: DecoderShape
    embedding_VE: Tensor
    normed: Callable[[Tensor], Tensor]  # by the norm behind the last layer
    logits: Callable[[Tensor], Tensor]  # float32 [S, V] of what is normed


class HeadEnding(NamedTuple):
    """What makes logits of a head's own states."""

    norm: Norm | None
    head: LinearMap  # its own, or the model's
    ids_D: Tensor | None = None  # the model's tokens by those of the head; None: they are the same


class DraftHead(Protocol):
    """A layer that sees a token and what the model made of the one before it.

    What it makes of that stands in the place of the model's state where the next draft is made.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the model, those whose inputs it sees; as many as there are: what the last makes."""
        ...

    @property
    def embedding(self) -> Embedding: ...

    @property
    def mixers(self) -> tuple[Mixer[LinearMap], ...]: ...

    @property
    def layer(self) -> Layer[LinearMap]:
        """Its parts, as a model's layer has them."""
        ...

    @property
    def ending(self) -> HeadEnding: ...

    def kept(self, states: Sequence[Tensor]) -> Tensor:
        """What is kept of tokens, [T, E], whose states these are, by layer."""
        ...

    def forward(self, hidden: Hidden, x_TE: Tensor, step: StepContext[LinearMap]) -> None:
        """Make its own states of a step's tokens, whose embeddings are in the stream, each behind
        the position with what x has of it."""
        ...

    def logits(self, own_SE: Tensor) -> Tensor:
        """Float32 [S, V] for what follows the tokens of these states."""
        ...


class HeadSource(NamedTuple):
    """What a head is made of: its own tensors, and the model that it drafts for."""

    shape: DecoderShape  # the head's, of one layer
    raw: Mapping[str, Any]  # its config.json
    weights: WeightSource
    files: SafetensorsFiles | None  # what they are from, if they are stored
    make_linear: LinearMaker[LinearMap]
    ends: ModelEnds

    def builder(self) -> Builder[LinearMap]:
        return Builder(self.shape, self.raw, (BEHIND_FIRST,), self.weights, self.make_linear)

    def prefix(self, module: str) -> str:
        """What names of a folder begin with, which has a module of this name behind it."""
        return next((p for p in ("", "model.") if self.weights.has(p + module)), "")

    def embedding(self, name: str) -> Embedding:
        """The head's own, where the folder has one that is not the model's."""
        shared_VE = self.ends.embedding_VE
        if not self.has(f"{name}.weight"):
            return Embedding(shared_VE)
        own_VE = self.weights.take(f"{name}.weight", tuple(shared_VE.shape))
        return Embedding(shared_VE if torch.equal(own_VE, shared_VE) else own_VE)

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        return self.files is not None and self.files.has(name)

    def stored(self, name: str) -> Tensor | None:
        """A tensor in the dtype in which it is stored."""
        return self.files.read(name) if self.files is not None and self.files.has(name) else None


def normed(x_TE: Tensor, norm: Norm, step: StepContext[LinearMap]) -> Tensor:
    """By the operation that a step has for it, which of one token is the faster one."""
    return step.computed(step.normed(Hidden(x_TE), norm))


def side_by_side(
    hidden: Hidden,
    x_TE: Tensor,
    norms: tuple[Norm, Norm] | None,
    step: StepContext[LinearMap],
) -> Tensor:
    """[T, 2E]: the stream and x, each behind its norm, if they have some."""
    both_T2E = torch.cat((hidden.x_TE, x_TE), dim=-1)
    if norms is None:
        step.normed(hidden, None)  # begins a part
    else:
        width = x_TE.shape[1]
        both_T2E[:, :width] = normed(hidden.x_TE, norms[0], step)
        both_T2E[:, width:] = normed(x_TE, norms[1], step)  # overwrites what the other made
    return both_T2E
