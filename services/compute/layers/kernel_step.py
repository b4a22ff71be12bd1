"""A step on a GPU: the operations of the parts by fused kernels, on buffers that never move.

The arithmetic of eager_step.py in eight or nine launches a layer: norms take the residual addition
with them; head norms, rotation and the cache write are one; so are SiLU and the product with up,
and with few rows the products before them. One token takes six, with weights of 16 bits and of FP8
by rows: norm and qkv, rotation and cache write, attention, out, norm with gate, up and SiLU, down.
A product takes 3 to 55 us there, and each launch that is left out saves 1.6 and a gap
(benchmarks/results/gpu_kernels.md). Models with norms behind their parts, too, take eight: both
norms and the addition are one before each part.

Shape legend: T tokens (the bucket), E hidden width, F inner width of the MLP, H query heads,
K kv heads, D head width, C = (H + 2K) * D, N pages, P positions in a page, J = D / 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.ranks.rank_rows import RankRows
from services.compute.kernels.rows.activations import act_mul, activate
from services.compute.kernels.rows.add_norm import NormedInput, add_norm
from services.compute.kernels.rows.combine_experts import WeightedRows, combine_experts
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm, quantize_rows
from services.compute.kernels.rows.rotate_and_store import HeadNorms, RotaryTables, rotate_and_store
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.kernel_experts import ExpertProduct, ExpertRoom
from services.compute.layers.kernel_latent import LatentStep, attend_latent
from services.compute.layers.kernel_ranks import KernelRanks
from services.compute.layers.parts import (
    Activated,
    Activation,
    Attention,
    Experts,
    Hidden,
    Input,
    LatentAttention,
    Normed,
    Temperature,
)
from services.compute.layers.products import FusedProduct, Products
from services.compute.layers.rope import RopeSpec
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import AnyLinear, Embedding, Norm


class StreamBuffers(NamedTuple):
    """The residual stream and what was added last, where the next graph finds them."""

    x_TE: Tensor
    delta_TE: Tensor
    other_1E: Tensor  # with one token a norm's launch reads x while it writes the sum: they swap

    @staticmethod
    def make(
        max_tokens: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> StreamBuffers:
        zeros = torch.zeros(2 * max_tokens + 1, width, dtype=dtype, device=device)
        return StreamBuffers(*torch.split(zeros, [max_tokens, max_tokens, 1]))


class LayerCache(NamedTuple):
    """Where a layer's keys and values lie, and go."""

    pages: LayerPages
    page_table_NL: Tensor  # of its cache group
    kv_slots_T: Tensor  # of its cache group


NOTHING_SEEN: Mapping[int, Tensor] = {}


@dataclass(frozen=True, slots=True, eq=False)
class KernelDevice:
    """What all steps of a model have in common."""

    inputs: StepInputs
    stream: StreamBuffers
    ranks: KernelRanks
    scratch: Scratch
    kept: Scratch  # rows of experts, until they are added up in the next sublayer
    products: Products
    experts: ExpertProduct
    ropes: Mapping[RopeSpec, RotaryTables]
    query_factors: Mapping[Temperature | None, Tensor]  # by position
    pdl: bool  # kernels of ours begin while the one before them ends (dependent launch)
    norms_apart: bool = False  # none comes with the product behind it


class KernelStep:
    """A `StepContext` for one bucket: launched eagerly to warm up, under capture to be replayed."""

    def __init__(
        self,
        device: KernelDevice,
        num_tokens: int,
        caches: Sequence[LayerCache],
        attention: KernelAttention,
        seen: Mapping[int, Tensor] = NOTHING_SEEN,
    ) -> None:
        """What comes into the layers that are `seen` is copied there."""
        self._device = device
        self._num_tokens = num_tokens
        self._caches = caches
        self._attention = attention
        self._seen = seen
        self._hidden: Hidden | None = None  # of the sublayer
        self._weighted: WeightedRows | None = None  # what the last delta is made of, if not yet
        self._is_whole = False  # all ranks' rows are in it

    def embed(self, embedding: Embedding) -> Hidden:
        stream, num_tokens = self._device.stream, self._num_tokens
        x_TE = stream.x_TE[:num_tokens]
        tokens_T = self._device.inputs.tokens_T[:num_tokens]
        torch.index_select(embedding.weight_VE, 0, tokens_T, out=x_TE)
        if embedding.scale != 1.0:
            x_TE.mul_(embedding.scale)
        return self.begin()

    def begin(self) -> Hidden:
        """Go on with what lies in the stream."""
        self._attention.plan(self._num_tokens)
        self._device.ranks.begin()
        return Hidden(self._device.stream.x_TE[: self._num_tokens])

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        self._device.scratch.rewind()
        self._hidden = hidden
        return Normed(hidden, norm)

    def computed(self, x: Input) -> Tensor:
        if isinstance(x, Activated):
            inner_TF = self._take(x.gate_up_TF2.shape[1] // 2)
            act_mul(x.gate_up_TF2, inner_TF, x.activation, pdl=self._device.pdl)
            return inner_TF
        if isinstance(x, Tensor):
            return x
        if x.value_TE is None:
            x_TE, norm = x.hidden.x_TE, x.norm
            x.value_TE = x_TE if norm is None else self._take(x_TE.shape[1])
            self._compute(x, None if norm is None else x.value_TE)
        return x.value_TE

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        """Leave the sum to the launch of the next norm."""
        hidden.behind, hidden.scale = behind, scale
        hidden.delta_TE = delta_TE
        if self._is_whole:
            self._is_whole = False
            return
        if self._device.ranks.is_split:
            self._combine(hidden)
        hidden.delta_TE = self._device.ranks.added_up(delta_TE)

    def settle(self, hidden: Hidden) -> None:
        self.computed(Normed(hidden, None))

    def linear(self, x: Input, linear: AnyLinear) -> Tensor:
        return self._multiply(x, linear, None)

    def linear_out(self, x: Input, linear: AnyLinear) -> Tensor:
        return self._multiply(x, linear, self._device.ranks.room(self._num_tokens))

    def gated(self, x: Input, gate_up: AnyLinear, activation: Activation) -> Input:
        product, width = self._device.products[type(gate_up)], gate_up.num_out // 2
        row, fused = self._taking(gate_up), product.fused
        if row is not None and gate_up.bias_O is None and _has_norm(x):
            inner_TF = self._take(width)
            row.normed_gated(self._into_launch(x), gate_up, activation, inner_TF)
        elif fused is not None and fused.can_gate(self._num_tokens, gate_up):
            value_TI, inner_TF = self.computed(x), self._take(width)
            fused.gated(value_TI, gate_up, activation, inner_TF)
        else:
            return Activated(self._multiply(x, gate_up, None), activation)
        return inner_TF

    def activated(self, x: Input, up: AnyLinear, activation: Activation) -> Tensor:
        inner_TF = self.linear(x, up)
        activate(inner_TF, inner_TF, activation, pdl=self._device.pdl)
        return inner_TF

    def attend(self, qkv_TC: Tensor, attention: Attention[AnyLinear]) -> Tensor:
        self._show(attention.layer)
        device, cache = self._device, self._caches[attention.layer]
        heads = (-1, attention.num_heads, attention.head_dim)
        mixed_TC = self._take(attention.num_heads * attention.head_dim)
        rotate_and_store(
            qkv_TC,
            device.inputs.positions_T,
            cache.kv_slots_T,
            None if attention.rope is None else device.ropes[attention.rope],
            HeadNorms(
                attention.q_norm,
                attention.k_norm,
                attention.norms_rotated,
                attention.norms_all_heads,
            ),
            cache.pages.entries,
            attention.num_heads,
            query_factors_P=device.query_factors.get(attention.temperature),
            kv_scales=cache.pages.scales,
            pdl=device.pdl,
        )
        call = AttentionCall(
            qkv_TC[:, : mixed_TC.shape[1]].view(heads),
            cache.pages.entries,
            cache.page_table_NL,
            mixed_TC.view(heads),
            attention.scale,
            attention.span,
            attention.softcap,
            cache.pages.scales,
            attention.sinks_H,
            cache.kv_slots_T,
        )
        self._attention.attend(call)
        return mixed_TC

    def experts(
        self, x_TE: Tensor, experts: Experts[AnyLinear], shared_TE: Tensor | None
    ) -> Tensor:
        """The tensor is to be added, and nothing else: its sum may come with that."""
        device, num_tokens = self._device, self._num_tokens
        ranks, num_pairs = device.ranks, num_tokens * experts.routing.top_k
        room = ExpertRoom(ranks.room(num_tokens), ranks.pairs_room(num_tokens, num_pairs))
        device.kept.rewind()
        self._weighted = device.experts(x_TE, experts, shared_TE, room, device.scratch, device.kept)
        if room.pairs_RE is not None:
            ranks.add_up_pairs(num_tokens, num_pairs)
            self._is_whole = True
        return room.own_TE

    def attend_latent(self, down_TC: Tensor, attention: LatentAttention[AnyLinear]) -> Tensor:
        self._show(attention.layer)
        device, cache = self._device, self._caches[attention.layer]
        step = LatentStep(
            positions_T=device.inputs.positions_T,
            kv_slots_T=cache.kv_slots_T,
            page_table_NL=cache.page_table_NL,
            pages=cache.pages,
            tables=device.ropes[attention.rope],
            attention=self._attention,
            take=self._take,
            multiply=self.linear,
            pdl=device.pdl,
        )
        return attend_latent(down_TC, attention, step)

    def finish(self, hidden: Hidden, *, is_whole: bool = False) -> None:
        """Leave the stream where the next graph finds it; `is_whole`: with the last part added."""
        ranks = self._device.ranks
        if ranks.is_split or is_whole:
            self.settle(hidden)
        else:
            self._combine(hidden)
        ranks.end()
        x_TE = self._device.stream.x_TE[: self._num_tokens]
        if hidden.x_TE.data_ptr() != x_TE.data_ptr():
            x_TE.copy_(hidden.x_TE)

    def _show(self, layer: int) -> None:
        """The product before a layer's attention has done the sum that the stream waited for."""
        seen_TE = self._seen.get(layer)
        if seen_TE is not None and self._hidden is not None:
            seen_TE[: self._num_tokens].copy_(self._hidden.x_TE)

    def _combine(self, hidden: Hidden) -> None:
        """Make the delta one row of each token."""
        if self._weighted is not None and isinstance(hidden.delta_TE, Tensor):
            combine_experts(self._weighted, hidden.delta_TE, pdl=self._device.pdl)
            self._weighted = None

    def _take(self, width: int) -> Tensor:
        return self._device.scratch.take(self._num_tokens, width)

    def _compute(self, normed: Normed, out_TE: Tensor | QuantizedRows | None) -> None:
        """Do the sum that the stream waits for, and write the norm."""
        hidden, norm = normed.hidden, normed.norm
        if norm is not None or hidden.delta_TE is not None:
            weighted, self._weighted = self._weighted, None
            add_norm(
                hidden.x_TE,
                hidden.delta_TE if weighted is None else weighted,
                norm,
                out_TE,
                post=hidden.behind,
                scale=hidden.scale,
                pdl=self._device.pdl,
            )
        hidden.forget()

    def _quantized(self, x: Input, form: RowForm, num_in: int) -> QuantizedRows:
        """The value as codes, by the launch that computes it or, if there was one, by another."""
        num_bytes = QuantizedRows.num_bytes(form, self._num_tokens, num_in)
        memory = self._device.scratch.take_bytes(num_bytes)
        rows = QuantizedRows.within(memory, form, self._num_tokens, num_in)
        if isinstance(x, Activated):
            act_mul(x.gate_up_TF2, rows, x.activation, pdl=self._device.pdl)
        elif _has_norm(x) and x.value_TE is None:
            self._compute(x, rows)
        else:
            quantize_rows(self.computed(x), rows, pdl=self._device.pdl)
        return rows

    def _multiply(self, x: Input, linear: AnyLinear, out_TO: Tensor | None) -> Tensor:
        row, product = self._taking(linear), self._device.products[type(linear)]
        if row is not None and _has_norm(x):
            out_TO = self._take(linear.num_out) if out_TO is None else out_TO
            row.normed(self._into_launch(x), linear, out_TO)
            return out_TO
        form = product.row_form(self._num_tokens, linear)
        # before the output is taken: scratch comes in order
        value = self.computed(x) if form is None else self._quantized(x, form, linear.num_in)
        out_TO = self._take(linear.num_out) if out_TO is None else out_TO
        product(value, linear, out_TO)
        return out_TO

    def _taking(self, linear: AnyLinear) -> FusedProduct[Any] | None:
        """What takes the norm of this map's input into its launch; else it is one by itself."""
        device = self._device
        fused = device.products[type(linear)].fused
        if fused is None or not fused.can_norm(self._num_tokens, linear, device.norms_apart):
            return None
        return fused

    def _into_launch(self, x: Normed) -> NormedInput:
        """The norm for a product's launch, which leaves the sum in the other buffer.

        So does the first, which has nothing to add: mostly there are two in each layer, and then
        the stream ends where it began.
        """
        hidden, stream = x.hidden, self._device.stream
        self._combine(hidden)
        assert not isinstance(hidden.delta_TE, RankRows)  # norms are apart, then
        is_other = hidden.x_TE.data_ptr() == stream.other_1E.data_ptr()
        sum_TE = stream.x_TE[:1] if is_other else stream.other_1E
        normed = NormedInput(
            hidden.x_TE, hidden.delta_TE, x.norm, sum_TE, hidden.behind, hidden.scale
        )
        hidden.forget()
        hidden.x_TE = sum_TE
        return normed


def _has_norm(x: Input) -> TypeGuard[Normed]:
    return isinstance(x, Normed) and x.norm is not None
