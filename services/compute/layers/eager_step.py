"""A step on the CPU: the operations of the parts in plain torch, one after the other.

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width, C = (H + 2K) * D.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.distributed.shard import HeadPart
from services.compute.layers.eager_activations import ACTIVATIONS
from services.compute.layers.eager_experts import run_experts
from services.compute.layers.eager_latent import attend_latent
from services.compute.layers.parts import (
    Activated,
    Activation,
    Attention,
    Experts,
    Hidden,
    Input,
    LatentAttention,
    Layer,
    Mixer,
    Normed,
)
from services.compute.layers.rope import Rope, RopeSpec, rotate
from services.compute.layers.step_attention import StepAttention
from services.compute.layers.weighted_layers import Embedding, LinearMap, Norm

Layers: TypeAlias = Sequence[Layer[LinearMap]]


class RopeTables:
    """The tables of the rotations that a model's layers have."""

    def __init__(
        self, mixers: Sequence[Mixer[LinearMap]], max_positions: int, dtype: torch.dtype
    ) -> None:
        ropes: dict[tuple[RopeSpec, float], Rope] = {}
        pairs: dict[tuple[RopeSpec, float], HeadRopes] = {}
        for mixer in mixers:
            if mixer.rope is None or (mixer.rope, mixer.rotation_scale) in pairs:
                continue
            for scale in (mixer.rotation_scale, 1.0):
                if (mixer.rope, scale) not in ropes:
                    tables = mixer.rope.tables(max_positions)
                    rope = Rope.build(tables, scale, dtype, torch.device("cpu"))
                    ropes[mixer.rope, scale] = rope
            pairs[mixer.rope, mixer.rotation_scale] = HeadRopes(
                (mixer.num_heads, ropes[mixer.rope, mixer.rotation_scale]),
                (mixer.num_kv_heads, ropes[mixer.rope, 1.0]),
            )
        self._pairs = tuple(pairs.values())
        # by numbers: hashing a spec twice a layer took 3 % of a step of a 100 M model
        number = {key: number for number, key in enumerate(pairs)}
        self.of_layer = tuple(
            None if mixer.rope is None else number[mixer.rope, mixer.rotation_scale]
            for mixer in mixers
        )

    def at(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The rows of these positions: looked up once a step for all layers."""
        return [pair.at(positions_T) for pair in self._pairs]


class HeadRopes(NamedTuple):
    """How many heads of queries turn by one rope, and of keys by another: all in one pass."""

    queries: tuple[int, Rope]
    keys: tuple[int, Rope]

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions, [T, H + K, D] each."""
        by_part = [
            [table_T1D.expand(-1, heads, -1) for table_T1D in rope.at(positions_T)]
            for heads, rope in self
        ]
        cos, sin = zip(*by_part, strict=True)
        return torch.cat(cos, 1), torch.cat(sin, 1)


class EagerStep:
    """A `StepContext` of linear maps that multiply by themselves."""

    def __init__(
        self, tokens_T: Tensor, attention: StepAttention, tables: RopeTables, ranks: Ranks
    ) -> None:
        self._tokens_T = tokens_T
        self._ranks = ranks
        self._attention = attention
        self.rope_rows = tables.at(attention.positions_T)
        self._ropes_of_layer = tables.of_layer

    def embed(self, embedding: Embedding) -> Hidden:
        return Hidden(embedding(self._tokens_T))

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        return Normed(hidden, norm, hidden.x_TE if norm is None else normalised(norm, hidden.x_TE))

    def computed(self, x: Input) -> Tensor:
        value = x.value_TE if isinstance(x, Normed) else x
        if value is None or isinstance(value, Activated):
            raise RuntimeError("an input on the CPU has its value from the beginning")
        return value

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        self._ranks.add_up(delta_TE)
        delta_TE = delta_TE if behind is None else behind(delta_TE)
        if scale == 1.0:
            hidden.x_TE.add_(delta_TE)
        else:
            hidden.x_TE.add_(delta_TE, alpha=scale)

    def settle(self, hidden: Hidden) -> None:
        pass

    def through(self, layers: Layers, hidden: Hidden) -> Generator[bool, None, None]:
        """Take the residual stream through layers; pauses after each, with more to compute."""
        for layer in layers:
            layer(hidden, self)
            yield True

    # A call of Python's between two products counts double: torch's other threads wait for the next
    # product for a while, then sleep.
    def linear(self, x: Input, linear: LinearMap) -> Tensor:
        return linear(self.computed(x) if type(x) is Normed else x)  # type: ignore[arg-type]

    linear_out = linear

    def gated(self, x: Input, gate_up: LinearMap, activation: Activation) -> Tensor:
        gate_TF, up_TF = self.linear(x, gate_up).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate_TF).mul_(up_TF)

    def activated(self, x: Input, up: LinearMap, activation: Activation) -> Tensor:
        return ACTIVATIONS[activation](self.linear(x, up))

    def attend(self, qkv_TC: Tensor, attention: Attention[LinearMap]) -> Tensor:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        qkv = qkv_TC.view(-1, heads + 2 * kv_heads, attention.head_dim)
        q_THD, kv = qkv[:, :heads], qkv[:, heads:]
        has_norms = attention.q_norm is not None or attention.k_norm is not None
        if has_norms and not attention.norms_rotated:
            self._norm_heads(attention, q_THD, kv[:, :kv_heads])
        ropes = self._ropes_of_layer[attention.layer]
        if ropes is not None:
            self._rotate(qkv[:, : heads + kv_heads], self.rope_rows[ropes])
        if has_norms and attention.norms_rotated:
            self._norm_heads(attention, q_THD, kv[:, :kv_heads])
        if attention.norms_rotated or ropes is None:
            self._scale(q_THD, attention.scale)
        if attention.temperature is not None:
            factors_T = attention.temperature.at(self._attention.positions_T)
            q_THD.mul_(factors_T[:, None, None])
        kv_T2KD = kv.view(-1, 2, kv_heads, attention.head_dim)
        return self._attention.attend(
            attention.layer, q_THD, kv_T2KD, attention.softcap, attention.sinks_H
        )

    def attend_latent(self, down_TC: Tensor, attention: LatentAttention[LinearMap]) -> Tensor:
        ropes = self._ropes_of_layer[attention.layer]
        if ropes is None:
            raise RuntimeError("a part of every latent's key rotates")
        return attend_latent(down_TC, attention, self._attention, self.rope_rows[ropes])

    def experts(
        self, x_TE: Tensor, experts: Experts[LinearMap], shared_TE: Tensor | None
    ) -> Tensor:
        return run_experts(x_TE, experts, shared_TE)

    def _rotate(self, x_TND: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        rotate(x_TND, rows)

    def _scale(self, q_THD: Tensor, scale: float) -> None:
        q_THD.mul_(scale)

    def _norm_heads(self, attention: Attention[LinearMap], q_THD: Tensor, k_TKD: Tensor) -> None:
        if attention.part is not None:
            _norm_across(attention, attention.part, (q_THD, k_TKD), self._ranks)
            return
        for norm, x_TND in ((attention.q_norm, q_THD), (attention.k_norm, k_TKD)):
            if norm is not None:
                x_TND.copy_(_head_norm(x_TND, norm, attention.norms_all_heads))


StepMaker: TypeAlias = Callable[[Tensor, StepAttention, RopeTables, Ranks], EagerStep]


def normalised(norm: Norm, x_TE: Tensor) -> Tensor:
    """The same as the norm by itself.

    torch makes an RMS norm of nine operations. Of a single token three are enough: in a step of a
    100 M model its 25 norms took 0.9 ms so, and take 0.4 with these.
    """
    weight_E = norm.weight_E
    if len(x_TE) != 1 or norm.kind != "rms" or weight_E.dtype != x_TE.dtype:
        return norm(x_TE)
    length = float(torch.linalg.vector_norm(x_TE, dtype=torch.float32))
    factor = 1.0 / sqrt(length * length / len(weight_E) + norm.eps)
    return torch.addcmul(_zeros(weight_E.shape, weight_E.dtype), x_TE, weight_E, value=factor)


@cache
def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _norm_across(
    attention: Attention[LinearMap], part: HeadPart, heads: tuple[Tensor, Tensor], ranks: Ranks
) -> None:
    """RMS norms of all ranks' queries together, and of all their keys: each rank has the squares of
    its heads, those of a key that several have only once."""
    squares = [x_TND.float().square().sum((1, 2)) for x_TND in heads]
    if not part.counts_kv:
        squares[1].zero_()
    all_2T = torch.stack(squares)
    ranks.add_up(all_2T)
    counts = part.num_heads, part.num_kv_heads
    norms = attention.q_norm, attention.k_norm
    for x_TND, norm, count, squares_T in zip(heads, norms, counts, all_2T, strict=True):
        if norm is not None:
            factor_T = (squares_T / (count * attention.head_dim) + norm.eps).rsqrt()
            weight_ND = norm.weight_E.float().view(x_TND.shape[1:])
            x_TND.copy_(x_TND.float() * factor_T[:, None, None] * weight_ND)


def _head_norm(x_TND: Tensor, norm: Norm, together: bool) -> Tensor:
    if together:
        return norm(x_TND.flatten(1)).view(x_TND.shape)
    width = x_TND.shape[-1]
    if len(norm.weight_E) == width:
        return norm(x_TND)
    one = replace(norm, weight_E=torch.ones_like(norm.weight_E[:width]))
    return one(x_TND) * norm.weight_E.view(-1, width)
