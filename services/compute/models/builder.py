"""Builds decoders of a checkpoint's tensors: what the files of the families are written with.

Shape legend: E hidden width, F inner width of the MLP, V vocabulary, X experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from common.expert_shape import ExpertShape
from services.compute.distributed.shard import WHOLE, Shard
from services.compute.kernels.experts.routing import Routing
from services.compute.kernels.step.span import AttentionSpan
from services.compute.layers.parts import (
    MLP,
    Activation,
    Attention,
    Experts,
    GatedMLP,
    Layer,
    Mixer,
)
from services.compute.layers.rope import RopeDefaults, RopeSpec, read_rope
from services.compute.layers.weighted_layers import LinearMaker, Norm
from services.compute.models.decoder import Decoder
from services.compute.models.ends import LLAMA_NAMES, Ends, TopNames
from services.compute.models.expert_tensors import (
    QWEN_EXPERTS,
    ExpertModules,
    ExpertTensors,
    check_groups,
)
from services.compute.models.head_rows import qkv_rows
from services.compute.models.weights import WeightSource
from services.compute.quantization.packed import UNCUT, Cut, Weight

L = TypeVar("L")
PLAIN_ROPE = RopeDefaults()


@dataclass(frozen=True, slots=True)
class NormForm:
    """What kind of norm a family has throughout."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_bias: bool = False
    plus_one: bool = False  # the checkpoint holds the weight less one
    round_first: bool = True


class Builder(Generic[L]):
    """Takes the tensors of one checkpoint in the order in which a family asks for them.

    Its methods raise ModelError for what is missing or of another shape. Of a model that several
    ranks share they make this rank's part: of maps before heads and inner widths its rows, of those
    behind them its columns, whose results are to be added up. Of a stage they make its layers.
    """

    def __init__(
        self,
        shape: DecoderShape,
        raw: Mapping[str, Any],
        spans: tuple[AttentionSpan, ...],
        weights: WeightSource,
        make_linear: LinearMaker[L],
        shard: Shard = WHOLE,
    ) -> None:
        self.shape = shape  # of the whole model
        self.heads = shard.heads(shape.num_heads, shape.num_kv_heads)
        self.layers = shard.layers(shape.num_layers)
        self.raw = raw
        self.needs_head = True  # False: it may be missing, as where only embeddings are made
        self._spans = spans
        self._weights = weights
        self._make_linear = make_linear
        self._shard = shard
        self._linears: list[L] = []
        self._mixers: list[Mixer[L]] = []

    @property
    def layer_number(self) -> int:
        """Of the layer that is being made, among all of the model."""
        return self.layers.start + len(self._mixers)

    @property
    def mixer_number(self) -> int:
        """Of its mixer, among those that are made here."""
        return len(self._mixers)

    @property
    def mixers(self) -> tuple[Mixer[L], ...]:
        """Those that were made so far."""
        return tuple(self._mixers)

    @property
    def mixture(self) -> ExpertShape:
        """The sizes of mixtures of experts, which config.json has said."""
        if self.shape.experts is None:
            raise ValueError("a family without experts has no mixture")
        return self.shape.experts

    @property
    def span(self) -> AttentionSpan:
        """Which positions the queries of the layer that is being made see."""
        return self._spans[self.layer_number]

    @property
    def layer_type(self) -> str:
        return "full_attention" if self.span.is_full else "sliding_attention"

    def rounded(self, value: float) -> float:
        """A number in the dtype of the weights."""
        return float(torch.tensor(value, dtype=self._weights.dtype))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a module of this name."""
        return self._weights.has(name)

    def skip(self, *prefixes: str) -> None:
        """Leave tensors whose names begin so."""
        self._weights.skip(*prefixes)

    def norm(self, name: str, form: NormForm, *shape: int) -> Norm:
        """A norm of the residual stream, or one whose weight has another shape."""
        shape = shape or (self.shape.hidden_size,)
        weight_E = self._weights.take(f"{name}.weight", shape).flatten()
        if form.plus_one:
            weight_E = weight_E.float() + 1.0
        bias_E = None
        if form.has_bias:
            bias_E = self._weights.take(f"{name}.bias", shape).to(weight_E.dtype)
        return Norm(weight_E, form.eps, form.kind, bias_E, form.round_first)

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        bias: bool,
        order: Tensor | None = None,
    ) -> L:
        """Maps of one input as one, their rows stacked: all, or those of `order`."""
        if order is not None and torch.equal(order, torch.arange(sum(rows))):
            order = None
        weight = self._weights.linear(names, rows, columns, Cut(order))
        bias_O = self._weights.stack([f"{n}.bias" for n in names], rows) if bias else None
        if order is not None and bias_O is not None:
            bias_O = bias_O[order.to(bias_O.device)]
        return self._add(weight, bias_O)

    def _summed(self, name: str, part: range, columns: int, bias: bool) -> L:
        """A map of this part of so many inputs: the ranks' results are added up, so that one of
        them has the bias."""
        rows, cut = (self.shape.hidden_size,), UNCUT if len(part) == columns else Cut(inputs=part)
        weight = self._weights.linear([name], rows, columns, cut)
        bias_O = self._weights.stack([f"{name}.bias"], rows) if bias else None
        bias_O = None if self._shard.rank else bias_O
        self._linears.append(linear := self._make_linear.summed(weight, bias_O, columns))
        return linear

    def plain(self, name: str, rows: int, columns: int) -> Tensor:
        """The numbers [rows, columns] of a map that is not multiplied by as it stands."""
        return self._weights.numbers(name, (rows, columns))

    def _add(self, weight: Weight, bias: Tensor | None, dense: Tensor | None = None) -> L:
        linear = self._make_linear(weight, bias, dense)
        self._linears.append(linear)
        return linear

    def rope(
        self, layer_type: str = "full_attention", defaults: RopeDefaults = PLAIN_ROPE
    ) -> RopeSpec:
        """How config.json says that layers of this type turn with positions."""
        return read_rope(self.raw, self.shape.head_dim, layer_type, defaults)

    def qkv(
        self, names: Sequence[str], rope: RopeSpec | None, bias: bool, by_kv_head: bool = False
    ) -> L:
        """Queries, keys and values of the rank's heads as one map: of three tensors, or of one.

        `by_kv_head`: the one has the queries of each kv head, then its key, then its value.
        """
        shape = self.shape
        rows = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
        order = qkv_rows(shape, self.heads, rope, by_kv_head)
        rows = rows if len(names) == 3 else [sum(rows)]
        return self.linear(names, rows, shape.hidden_size, bias, order)

    def mixer(
        self, qkv: L, out: L, rope: RopeSpec | None, *, scale: float = 0.0, **more: Any
    ) -> Attention[L]:
        """The next layer's attention; `more` is `Attention`'s."""
        shape = self.shape
        mixer = Attention(
            layer=self.mixer_number,
            num_heads=len(self.heads.queries),
            num_kv_heads=len(self.heads.kv),
            head_dim=shape.head_dim,
            qkv=qkv,
            out=out,
            scale=scale or shape.head_dim**-0.5,
            rope=rope,
            span=self.span,
            **more,
        )
        self.add_mixer(mixer)
        return mixer

    def add_mixer(self, mixer: Mixer[L]) -> None:
        """The next layer has this one."""
        self._mixers.append(mixer)

    def attention(
        self,
        at: str,
        rope: RopeSpec | None,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: NormForm | None = None,
        **more: Any,
    ) -> Attention[L]:
        """The same of tensors that are named as Llama's, the norms of heads as Qwen3's."""
        qkv = self.qkv([f"{at}.{name}_proj" for name in "qkv"], rope, qkv_bias)
        if head_norm is not None:
            more["q_norm"] = self.head_norm(f"{at}.q_norm", head_norm, rope)
            more["k_norm"] = self.head_norm(f"{at}.k_norm", head_norm, rope)
        return self.mixer(qkv, self.out(f"{at}.o_proj", out_bias), rope, **more)

    def sinks(self, name: str) -> Tensor:
        """Logits of each head [H] that take part in every softmax."""
        sinks_H = self._weights.take(name, (self.shape.num_heads,), torch.float32)
        return _of(self.heads.queries, sinks_H)

    def out(self, name: str, bias: bool = False, width: int = 0) -> L:
        """The map behind attention; `width` of a head's result, if it is not that of keys."""
        width = width or self.shape.head_dim
        part = _times(self.heads.queries, width)
        return self._summed(name, part, self.shape.num_heads * width, bias)

    def head_norm(self, name: str, form: NormForm, rope: RopeSpec | None, *shape: int) -> Norm:
        """The norm of queries or of keys; its weight is of one head, or has this shape."""
        norm = self.norm(name, form, *(shape or (self.shape.head_dim,)))
        return norm if rope is None else replace(norm, weight_E=rope.in_order(norm.weight_E))

    def norms_of_all_heads(
        self, at: str, form: NormForm, rope: RopeSpec | None, together: bool = True
    ) -> dict[str, Any]:
        """What `mixer` takes for norms whose weights are of all heads, one after the other: of all
        heads together, or of each, where weights are stored by head."""
        width, norms = self.shape.head_dim, {}
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        for name, count, part in (
            ("q_norm", num_heads, self.heads.queries),
            ("k_norm", num_kv_heads, self.heads.kv),
        ):
            shape = (count * width,) if together else (count, width)
            norm = self.head_norm(f"{at}.{name}", form, rope, *shape)
            norms[name] = replace(norm, weight_E=_of(_times(part, width), norm.weight_E))
        is_split = together and self._shard.size > 1
        return {**norms, "norms_all_heads": together, "part": self.heads if is_split else None}

    def float32(self, name: str, *shape: int) -> Tensor:
        """A tensor that has to stay exact."""
        return self._weights.take(name, shape, torch.float32)

    def gated_mlp(
        self,
        at: str,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        merged: bool = False,
        width: int = 0,
    ) -> GatedMLP[L]:
        """Named as Llama's; `merged` where the checkpoint has gate and up in one tensor. `width`:
        the inner one, if another than that of config.json."""
        names = ["gate_up_proj"] if merged else ["gate_proj", "up_proj"]
        gate_up = [f"{at}.{name}" for name in names]
        return self.gated_mlp_of(gate_up, f"{at}.down_proj", width, bias, activation)

    def gated_mlp_of(
        self,
        gate_up: Sequence[str],
        down: str,
        width: int = 0,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> GatedMLP[L]:
        """The same of modules of these names: of gate and up, or of both in one."""
        inner = width or self.shape.intermediate_size
        part = self._shard.part(inner)
        rows = (2 * inner,) if len(gate_up) == 1 else (inner, inner)
        mine = torch.tensor(part)
        order = torch.cat((mine, inner + mine))
        return GatedMLP(
            self.linear(gate_up, rows, self.shape.hidden_size, bias, order),
            self._summed(down, part, inner, bias),
            activation,
        )

    def router(self, name: str, num_out: int, bias: bool = False) -> L:
        """A map whose results are logits in float32; of codes, the numbers."""
        weight_XE = self._weights.numbers(name, (num_out, self.shape.hidden_size), torch.float32)
        bias_X = self._weights.stack([f"{name}.bias"], [num_out]) if bias else None
        return self._make_linear.router(weight_XE, bias_X)

    def experts(
        self,
        at: str,
        routing: Routing,
        modules: ExpertModules = QWEN_EXPERTS,
        **more: Any,
    ) -> Experts[L]:
        """The mixture of the layer whose name is `at`; `more` is `Experts`'."""
        check_groups(routing)
        count, make = routing.num_experts, self._make_linear
        sizes = self.shape.hidden_size, self.mixture.width, count
        tensors = ExpertTensors(self._weights, at, modules, *sizes, self._shard)
        num_held, down_biases = len(tensors.taken), tensors.down_biases()
        return Experts(
            router=self.router(f"{at}.{modules.router}", count, modules.have_bias),
            routing=routing,
            gate_up=make.experts(tensors.gate_ups(), num_held, tensors.gate_up_biases()),
            down=make.experts(tensors.downs(), num_held, down_biases),
            tokens_X=torch.zeros(count, dtype=torch.int64, device=self._weights.device),
            held=tensors.held,
            **more,
        )

    def mlp(self, up: str, down: str, bias: bool, activation: Activation) -> MLP[L]:
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        part = self._shard.part(inner)
        return MLP(
            self.linear([up], (inner,), hidden, bias, torch.tensor(part)),
            self._summed(down, part, inner, bias),
            activation,
        )

    def decoder(
        self,
        make_layer: Callable[[str], Layer[L]],
        norm: NormForm,
        names: TopNames = LLAMA_NAMES,
        *,
        embedding_scale: float = 1.0,
        head_bias: bool = False,
        **more: Any,
    ) -> Decoder[L]:
        """The whole model, or a stage of it; layers are made of where their names begin, `more` is
        `Decoder`'s.

        Raises ModelError for tensors that are left over.
        """
        shape, weights = self.shape, self._weights
        ends = Ends(weights, shape, self._shard, names, self.needs_head)
        embedding = ends.embedding(embedding_scale)
        for number in range(shape.num_layers):
            if number not in self.layers:
                weights.skip(f"{names.layers}.{number}.")
        layers = tuple(make_layer(f"{names.layers}.{number}") for number in self.layers)
        final_norm = self.norm(names.norm, norm)
        made = ends.head(embedding, head_bias)
        if made is None and not self._shard.is_last:
            head = self._linears[-1]
        else:
            head = self._add(*(made or (embedding.weight_VE, None)))
        weights.finish()
        return Decoder(
            shape,
            embedding,
            layers,
            tuple(self._mixers),
            tuple(self._linears),
            final_norm,
            head,
            made is not None,
            first_layer=self.layers.start,
            **more,
        )


def _times(part: range, width: int) -> range:
    """The numbers of rows of heads of this width."""
    return range(part.start * width, part.stop * width)


def _of(part: range, x: Tensor) -> Tensor:
    return x[part.start : part.stop]
