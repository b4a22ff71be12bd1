"""The forward pass of a decoder in plain torch: attention and a gated MLP, each after a norm.

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width, V vocabulary, S sampled rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.attention import Attention
from services.compute.layers.rope import Rope, angles, inverse_frequencies, rotate
from services.compute.layers.weighted_layers import LinearMap
from services.compute.models.decoder import Decoder, DecoderLayer


class Transformer:
    """Runs a decoder, one operation after the other."""

    def __init__(self, decoder: Decoder[LinearMap], max_positions: int) -> None:
        self._decoder = decoder
        config = decoder.config
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles_PD = angles(inv_freq, max_positions)
        like = (decoder.dtype, decoder.device)
        # tables of their own for queries carry the attention scale, which saves a pass
        self._q_rope = Rope.build(angles_PD, config.head_dim**-0.5, *like)
        self._k_rope = Rope.build(angles_PD, 1.0, *like)

    def forward(self, tokens_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, E] after the last layer, not yet normalised."""
        x_TE = self._decoder.embedding(tokens_T)
        q_rows = self._q_rope.at(attention.positions_T)
        k_rows = self._k_rope.at(attention.positions_T)
        for number, layer in enumerate(self._decoder.layers):
            mixed_TE = self._attend(number, layer, x_TE, (q_rows, k_rows), attention)
            x_TE.add_(mixed_TE)
            gate_TF, up_TF = layer.gate_up(layer.mlp_norm(x_TE)).chunk(2, dim=-1)
            x_TE.add_(layer.down(F.silu(gate_TF).mul_(up_TF)))
        return x_TE

    @property
    def has_head(self) -> bool:
        return self._decoder.has_head

    def normed(self, x_SE: Tensor) -> Tensor:
        return self._decoder.norm(x_SE)

    def logits(self, x_SE: Tensor) -> Tensor:
        """Float32 logits [S, V] of these hidden states."""
        return self._decoder.head(self.normed(x_SE)).float()

    def _attend(
        self,
        number: int,
        layer: DecoderLayer[LinearMap],
        x_TE: Tensor,
        rope_rows: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        attention: Attention,
    ) -> Tensor:
        config = self._decoder.config
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
