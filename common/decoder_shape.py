"""The sizes in config.json, and what of a model they do not allow.

Compute builds the model from this; the launcher refuses what cannot be served before it starts
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.architectures import ARCHITECTURES, check_fields, family_of, language_fields
from common.errors import ConfigError, ModelError
from common.expert_shape import ExpertShape, read_experts
from common.latent_shape import LatentShape, read_latent
from common.sizes import count, num_positions

_POSITION_BYTES = 12  # of a rotary table's element while it is made: angle, cosine, sine


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder, mostly under the names that config.json gives them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with latents, of what is rotated
    max_position_embeddings: int
    tie_word_embeddings: bool
    gated: bool = True
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    norms_all_heads: bool = False  # one norm is over the queries of all heads

    @property
    def num_layer_weights(self) -> int:
        """The weights of the linear maps of all layers, which quantization makes smaller."""
        return self._layer_weights(0 if self.experts is None else self.experts.num_experts)

    @property
    def num_expert_weights(self) -> int:
        """The weights of all experts that not every token sees."""
        if self.experts is None:
            return 0
        num_mixtures = self.num_layers - sum(self.experts.is_dense)
        of_layer = self.experts.num_routed_weights(self.hidden_size, self.experts.num_experts)
        return num_mixtures * of_layer

    @property
    def num_row_weights(self) -> int:
        """The weights that a step of one row reads: of experts those that see it."""
        num_layer_weights = self._layer_weights(0 if self.experts is None else self.experts.top_k)
        return num_layer_weights + self.vocab_size * self.hidden_size

    @property
    def num_step_weights(self) -> int:
        """The weights that steps read: all but the embedding's."""
        return self.num_layer_weights + self.vocab_size * self.hidden_size

    @property
    def num_common_weights(self) -> int:
        """The weights of steps that every token sees: all but those of experts it is routed to."""
        return self.num_step_weights - self.num_expert_weights

    @property
    def num_weights(self) -> int:
        """All weights except norms and biases."""
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_step_weights + embedding

    def _layer_weights(self, num_routed: int) -> int:
        """Of all layers, where so many experts count."""
        if self.latent is None:
            attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        else:
            attention = self.latent.num_weights(self.hidden_size, self.num_heads)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return self.num_layers * (attention + mlp)
        num_dense = sum(self.experts.is_dense)
        mixture = self.experts.num_weights(self.hidden_size, num_routed)
        mixtures = (self.num_layers - num_dense) * mixture
        return self.num_layers * attention + num_dense * mlp + mixtures

    def cache_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Return the size of the keys and values of this many tokens."""
        return self.num_layers * self.layer_cache_bytes(num_tokens, itemsize)

    def layer_cache_bytes(self, num_tokens: int, itemsize: int) -> int:
        if self.latent is not None:
            return num_tokens * self.latent.entry_dim * itemsize
        return num_tokens * 2 * self.num_kv_heads * self.head_dim * itemsize

    def position_bytes(self, num_positions: int) -> int:
        """Return the host memory for the rotary tables of this many positions."""
        return num_positions * self.head_dim * _POSITION_BYTES


def read_shape(raw: Mapping[str, Any]) -> DecoderShape:
    """Read the sizes of a supported model; ModelError names the one that cannot be."""
    family, raw = ARCHITECTURES[family_of(raw)], language_fields(raw)
    check_fields(family, raw)
    num_heads = count(raw, "num_attention_heads")
    hidden_size = count(raw, "hidden_size")
    latent = read_latent(raw) if family.has_latents else None
    head_dim = count(raw, "head_dim", family.head_dim or max(1, hidden_size // num_heads))
    num_kv_heads = count(raw, "num_key_value_heads", num_heads)
    if latent is not None:
        head_dim, num_kv_heads = latent.rope_dim, 1
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}."
        )
    num_layers = count(raw, "num_hidden_layers")
    return DecoderShape(
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(raw, "intermediate_size_mlp", count(raw, "intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        gated=family.gated,
        experts=read_experts(raw, num_layers) if family.has_experts else None,
        latent=latent,
        norms_all_heads=family.norms_all_heads,
    )


def check_split(shape: DecoderShape, num_ranks: int, num_stages: int, on_gpus: bool) -> None:
    """Raise ConfigError for a model that so many processes cannot have a part of each."""
    if num_stages > shape.num_layers:
        raise ConfigError(
            f"compute.pipeline_parallel_size is {num_stages}, and the model has "
            f"{shape.num_layers} layers, of which each stage needs one; lower it."
        )
    if num_ranks > shape.num_heads:
        raise ConfigError(
            f"compute.tensor_parallel_size is {num_ranks}, and the model has {shape.num_heads} "
            "query heads, of which each rank needs one; lower it."
        )
    if num_ranks > 1 and on_gpus and shape.norms_all_heads:
        raise ConfigError(
            f"compute.tensor_parallel_size is {num_ranks}: this model has a norm over the queries "
            "of all heads, which is split on the CPU only; leave it out, or take "
            "pipeline_parallel_size."
        )
