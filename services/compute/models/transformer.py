"""The decoder that Llama and its relatives are: attention and a gated MLP, each after a norm.

A family says which variations it has; nothing here knows a family.

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width, V vocabulary, S sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.attention import Attention
from services.compute.layers.embedding import Embedding
from services.compute.layers.linear import LinearMap, MakeLinear
from services.compute.layers.rms_norm import RMSNorm
from services.compute.layers.rope import Rope, angles, inverse_frequencies, rotate
from services.compute.models.config import DecoderConfig
from services.compute.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Variations:
    """Where families of this shape differ."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's query and key before rotation


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; queries, keys and values are one matrix, gate and up are another."""

    attention_norm: RMSNorm
    qkv: LinearMap
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: LinearMap
    mlp_norm: RMSNorm
    gate_up: LinearMap
    down: LinearMap
    window: int


class Transformer:
    """A decoder-only language model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        variations: Variations,
        weights: WeightSource,
        max_positions: int,
        make_linear: MakeLinear,
    ) -> None:
        self.config = config
        embedding_VE = weights.take(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        self._embedding = Embedding(embedding_VE)
        self._layers = [
            _load_layer(config, variations, weights, number, make_linear)
            for number in range(config.num_layers)
        ]
        self._norm = RMSNorm(
            weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps
        )
        if config.tie_word_embeddings:
            weights.skip("lm_head.weight")
            self._head = make_linear(embedding_VE)
        else:
            self._head = make_linear(weights.take("lm_head.weight", tuple(embedding_VE.shape)))
        weights.finish()
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles_PD = angles(inv_freq, max_positions)
        like = (embedding_VE.dtype, embedding_VE.device)
        # tables of their own for queries carry the attention scale, which saves a pass
        self._q_rope = Rope.build(angles_PD, config.head_dim**-0.5, *like)
        self._k_rope = Rope.build(angles_PD, 1.0, *like)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.weight_VE.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self._embedding.weight_VE.dtype

    def forward(self, tokens_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, E] after the last layer, not yet normalised."""
        x_TE = self._embedding(tokens_T)
        q_rows = self._q_rope.at(attention.positions_T)
        k_rows = self._k_rope.at(attention.positions_T)
        for number, layer in enumerate(self._layers):
            mixed_TE = self._attend(number, layer, x_TE, (q_rows, k_rows), attention)
            x_TE.add_(mixed_TE)
            gate_TF, up_TF = layer.gate_up(layer.mlp_norm(x_TE)).chunk(2, dim=-1)
            x_TE.add_(layer.down(F.silu(gate_TF).mul_(up_TF)))
        return x_TE

    def logits(self, x_SE: Tensor) -> Tensor:
        """Float32 logits [S, V] of these hidden states."""
        return self._head(self._norm(x_SE)).float()

    def _attend(
        self,
        number: int,
        layer: DecoderLayer,
        x_TE: Tensor,
        rope_rows: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        attention: Attention,
    ) -> Tensor:
        config = self.config
        qkv = layer.qkv(layer.attention_norm(x_TE)).view(
            -1, config.num_heads + 2 * config.num_kv_heads, config.head_dim
        )
        first_value = config.num_heads + config.num_kv_heads
        q_THD, k_TKD = qkv[:, : config.num_heads], qkv[:, config.num_heads : first_value]
        v_TKD = qkv[:, first_value:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD, k_TKD = layer.q_norm(q_THD), layer.k_norm(k_TKD)
        q_THD, k_TKD = rotate(q_THD, rope_rows[0]), rotate(k_TKD, rope_rows[1])
        return layer.out(attention.attend(number, q_THD, k_TKD, v_TKD, layer.window))


def _load_layer(
    config: DecoderConfig,
    variations: Variations,
    weights: WeightSource,
    number: int,
    make_linear: MakeLinear,
) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def norm(name: str, width: int) -> RMSNorm:
        return RMSNorm(weights.take(f"{prefix}{name}.weight", (width,)), config.rms_norm_eps)

    def merged(
        names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool
    ) -> LinearMap:
        weight = weights.stack([f"{prefix}{name}.weight" for name in names], rows, columns)
        if not bias:
            return make_linear(weight)
        return make_linear(
            weight, weights.stack([f"{prefix}{name}.bias" for name in names], rows, 0)
        )

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return DecoderLayer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=merged(qkv_names, (q_width, kv_width, kv_width), hidden, variations.qkv_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if variations.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if variations.qk_norm else None,
        out=merged(("self_attn.o_proj",), (hidden,), q_width, variations.out_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=merged(
            ("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, variations.mlp_bias
        ),
        down=merged(("mlp.down_proj",), (hidden,), inner, variations.mlp_bias),
        window=config.windows[number],
    )
