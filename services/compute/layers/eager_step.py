"""A step on the CPU: the operations of the parts in plain torch, one after the other.

Shape legend: T tokens, E hidden width, H query heads, K kv heads, D head width, C = (H + 2K) * D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.eager_attention import EagerAttention
from services.compute.layers.parts import Activation, Attention, Hidden, Input, Normed
from services.compute.layers.rope import Rope, RopeSpec, rotate
from services.compute.layers.weighted_layers import Embedding, LinearMap, Norm


class RopeTables:
    """The tables of the rotations that a model's layers have."""

    def __init__(
        self, mixers: Sequence[Attention[LinearMap]], max_positions: int, dtype: torch.dtype
    ) -> None:
        self._ropes: dict[tuple[RopeSpec, float], Rope] = {}
        for mixer in mixers:
            for scale in (query_scale(mixer), 1.0):
                if mixer.rope is not None and (mixer.rope, scale) not in self._ropes:
                    tables = mixer.rope.tables(max_positions)
                    rope = Rope.build(tables, scale, dtype, torch.device("cpu"))
                    self._ropes[mixer.rope, scale] = rope

    def at(self, positions_T: Tensor) -> dict[tuple[RopeSpec, float], tuple[Tensor, Tensor]]:
        """The rows of these positions: looked up once a step for all layers."""
        return {key: rope.at(positions_T) for key, rope in self._ropes.items()}


def query_scale(mixer: Attention[LinearMap]) -> float:
    """What the table of the queries carries of the scale of scores, which saves a pass over them.

    The norm that comes after a rotation would undo it.
    """
    return 1.0 if mixer.norms_rotated else mixer.scale


class EagerStep:
    """A `StepContext` of linear maps that multiply by themselves."""

    def __init__(self, tokens_T: Tensor, attention: EagerAttention, tables: RopeTables) -> None:
        self._tokens_T = tokens_T
        self._attention = attention
        self._ropes = tables.at(attention.positions_T)

    def embed(self, embedding: Embedding) -> Hidden:
        return Hidden(embedding(self._tokens_T))

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        return Normed(hidden, norm, hidden.x_TE if norm is None else norm(hidden.x_TE))

    def computed(self, normed: Normed) -> Tensor:
        if normed.value_TE is None:
            raise RuntimeError("a norm on the CPU has its value from the beginning")
        return normed.value_TE

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        hidden.x_TE.add_(delta_TE if behind is None else behind(delta_TE), alpha=scale)

    def settle(self, hidden: Hidden) -> None:
        pass

    def linear(self, x: Input, linear: LinearMap) -> Tensor:
        return linear(x if isinstance(x, Tensor) else self.computed(x))

    def linear_out(self, x: Input, linear: LinearMap) -> Tensor:
        return self.linear(x, linear)

    def gated(self, x: Input, gate_up: LinearMap, activation: Activation) -> Tensor:
        gate_TF, up_TF = self.linear(x, gate_up).chunk(2, dim=-1)
        return _activated(gate_TF, activation).mul_(up_TF)

    def activated(self, x: Input, up: LinearMap, activation: Activation) -> Tensor:
        return _activated(self.linear(x, up), activation)

    def attend(self, qkv_TC: Tensor, attention: Attention[LinearMap]) -> Tensor:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        qkv = qkv_TC.view(len(qkv_TC), heads + 2 * kv_heads, attention.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if not attention.norms_rotated:
            q_THD, k_TKD = _head_norms(attention, q_THD, k_TKD)
        rope, scale = attention.rope, query_scale(attention)
        if rope is not None:
            q_THD = rotate(q_THD, self._ropes[rope, scale])
            k_TKD = rotate(k_TKD, self._ropes[rope, 1.0])
        if attention.norms_rotated:
            q_THD, k_TKD = _head_norms(attention, q_THD, k_TKD)
        if attention.norms_rotated or rope is None:
            q_THD = q_THD * attention.scale
        return self._attention.attend(attention.layer, q_THD, k_TKD, v_TKD, attention.softcap)


def _head_norms(
    attention: Attention[LinearMap], q_THD: Tensor, k_TKD: Tensor
) -> tuple[Tensor, Tensor]:
    q_norm, k_norm, together = attention.q_norm, attention.k_norm, attention.norms_all_heads
    return _head_norm(q_THD, q_norm, together), _head_norm(k_TKD, k_norm, together)


def _head_norm(x_TND: Tensor, norm: Norm | None, together: bool) -> Tensor:
    if norm is None:
        return x_TND
    if together:
        return norm(x_TND.flatten(1)).view(x_TND.shape)
    width = x_TND.shape[-1]
    if len(norm.weight_E) == width:
        return norm(x_TND)
    one = replace(norm, weight_E=torch.ones_like(norm.weight_E[:width]))
    return one(x_TND) * norm.weight_E.view(-1, width)


def _activated(x_TF: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return F.silu(x_TF)
        case "gelu_tanh":
            return F.gelu(x_TF, approximate="tanh")
        case "gelu":
            return F.gelu(x_TF)
        case "relu2":
            return F.relu(x_TF).square_()
