"""The weights of the decoder that Llama and its relatives are, and how they are loaded.

A family says which variations it has; nothing here knows a family.

Shape legend: E hidden width, F inner width of the MLP, H query heads, K kv heads, D head width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from services.compute.layers.weighted_layers import Embedding, RMSNorm
from services.compute.models.config import DecoderConfig
from services.compute.models.weights import WeightSource

L = TypeVar("L")
MakeMap: TypeAlias = "Callable[[Tensor, Tensor | None], L]"
"""Makes of a weight [out, in] and perhaps a bias what the forward pass multiplies by."""


@dataclass(frozen=True, slots=True)
class DecoderLayer(Generic[L]):
    """One layer's weights; queries, keys and values are one matrix, gate and up are another."""

    attention_norm: RMSNorm
    qkv: L
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: L
    mlp_norm: RMSNorm
    gate_up: L
    down: L
    window: int


@dataclass(frozen=True, slots=True)
class Decoder(Generic[L]):
    """A decoder-only language model on one device, without a way to run it."""

    config: DecoderConfig
    embedding: Embedding
    layers: tuple[DecoderLayer[L], ...]
    norm: RMSNorm
    head: L
    has_head: bool = True  # False: `head` only stands in its place, as it makes no text

    @property
    def device(self) -> torch.device:
        return self.embedding.weight_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight_VE.dtype


def load_decoder(
    config: DecoderConfig, weights: WeightSource, make_linear: MakeMap[L], needs_head: bool = True
) -> Decoder[L]:
    """Take all tensors of a checkpoint; raises ModelError for what is missing or left over.

    Without `needs_head` the head may be missing, as it does where only embeddings are made.
    """
    embedding_VE = weights.take(
        "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    )
    layers = tuple(
        _load_layer(config, weights, number, make_linear) for number in range(config.num_layers)
    )
    norm = RMSNorm(weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
    has_head = needs_head or config.tie_word_embeddings or weights.has("lm_head.weight")
    if config.tie_word_embeddings or not has_head:
        weights.skip("lm_head.weight")
        head = make_linear(embedding_VE, None)
    else:
        head = make_linear(weights.take("lm_head.weight", tuple(embedding_VE.shape)), None)
    weights.finish()
    return Decoder(config, Embedding(embedding_VE), layers, norm, head, has_head)


def _load_layer(
    config: DecoderConfig, weights: WeightSource, number: int, make_linear: MakeMap[L]
) -> DecoderLayer[L]:
    prefix = f"model.layers.{number}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def norm(name: str, width: int) -> RMSNorm:
        return RMSNorm(weights.take(f"{prefix}{name}.weight", (width,)), config.rms_norm_eps)

    def merged(names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> L:
        weight = weights.stack([f"{prefix}{name}.weight" for name in names], rows, columns)
        if not bias:
            return make_linear(weight, None)
        return make_linear(
            weight, weights.stack([f"{prefix}{name}.bias" for name in names], rows, 0)
        )

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return DecoderLayer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=merged(qkv_names, (q_width, kv_width, kv_width), hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        out=merged(("self_attn.o_proj",), (hidden,), q_width, config.out_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=merged(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=merged(("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
        window=config.windows[number],
    )
