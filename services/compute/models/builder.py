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
from services.compute.kernels.routing import Routing
from services.compute.kernels.span import AttentionSpan
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
from services.compute.layers.weighted_layers import Embedding, LinearMaker, Norm
from services.compute.models.decoder import Decoder
from services.compute.models.expert_tensors import (
    QWEN_EXPERTS,
    ExpertModules,
    ExpertTensors,
    check_groups,
)
from services.compute.models.weights import WeightSource
from services.compute.quantization.packed import Packed, Weight

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


@dataclass(frozen=True, slots=True)
class TopNames:
    """Names of the tensors, and of the layers, that are not in a layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


LLAMA_NAMES = TopNames()


class Builder(Generic[L]):
    """Takes the tensors of one checkpoint in the order in which a family asks for them.

    Its methods raise ModelError for what is missing or of another shape.
    """

    def __init__(
        self,
        shape: DecoderShape,
        raw: Mapping[str, Any],
        spans: tuple[AttentionSpan, ...],
        weights: WeightSource,
        make_linear: LinearMaker[L],
    ) -> None:
        self.shape = shape
        self.raw = raw
        self.needs_head = True  # False: it may be missing, as where only embeddings are made
        self._spans = spans
        self._weights = weights
        self._make_linear = make_linear
        self._linears: list[L] = []
        self._mixers: list[Mixer[L]] = []

    @property
    def layer_number(self) -> int:
        """Of the layer that is being made."""
        return len(self._mixers)

    @property
    def mixture(self) -> ExpertShape:
        """The sizes of mixtures of experts, which config.json has said."""
        if self.shape.experts is None:
            raise ValueError("a family without experts has no mixture")
        return self.shape.experts

    @property
    def span(self) -> AttentionSpan:
        """Which positions the queries of the layer that is being made see."""
        return self._spans[len(self._mixers)]

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
        """Maps of one input as one, their rows stacked, in another order if one is given."""
        weight = self._weights.linear(names, rows, columns)
        bias_O = self._weights.stack([f"{n}.bias" for n in names], rows) if bias else None
        if order is not None and not torch.equal(order, torch.arange(len(order))):
            weight = in_order(weight, order)
            bias_O = None if bias_O is None else bias_O[order.to(bias_O.device)]
        return self._add(weight, bias_O)

    def plain(self, name: str, rows: int, columns: int) -> Tensor:
        """The numbers [rows, columns] of a map that is not multiplied by as it stands."""
        return self._weights.numbers(name, (rows, columns))

    def _add(self, weight: Weight, bias: Tensor | None) -> L:
        linear = self._make_linear(weight, bias)
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
        """Queries, keys and values as one map: of three tensors, or of one.

        `by_kv_head`: the one has the queries of each kv head, then its key, then its value.
        """
        shape = self.shape
        rows = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
        order = torch.arange(sum(rows))
        order = self._turned(self._ungrouped(order) if by_kv_head else order, rope)
        rows = rows if len(names) == 3 else [sum(rows)]
        return self.linear(names, rows, shape.hidden_size, bias, order)

    def mixer(
        self, qkv: L, out: L, rope: RopeSpec | None, *, scale: float = 0.0, **more: Any
    ) -> Attention[L]:
        """The next layer's attention; `more` is `Attention`'s."""
        shape = self.shape
        mixer = Attention(
            layer=self.layer_number,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
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
        return self._weights.take(name, (self.shape.num_heads,), torch.float32)

    def out(self, name: str, bias: bool = False) -> L:
        q_width = self.shape.num_heads * self.shape.head_dim
        return self.linear([name], (self.shape.hidden_size,), q_width, bias)

    def head_norm(self, name: str, form: NormForm, rope: RopeSpec | None, *shape: int) -> Norm:
        """The norm of queries or of keys; its weight is of one head, or has this shape."""
        norm = self.norm(name, form, *(shape or (self.shape.head_dim,)))
        return norm if rope is None else replace(norm, weight_E=rope.in_order(norm.weight_E))

    def norms_of_all_heads(self, at: str, form: NormForm, rope: RopeSpec | None) -> dict[str, Any]:
        """What `mixer` takes for norms whose weights are of all heads, one after the other."""
        num_heads = {"q_norm": self.shape.num_heads, "k_norm": self.shape.num_kv_heads}
        norms: dict[str, Any] = {
            name: self.head_norm(f"{at}.{name}", form, rope, count * self.shape.head_dim)
            for name, count in num_heads.items()
        }
        return {**norms, "norms_all_heads": True}

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
        hidden, inner = self.shape.hidden_size, width or self.shape.intermediate_size
        if merged:
            gate_up = self.linear([f"{at}.gate_up_proj"], (2 * inner,), hidden, bias)
        else:
            names = [f"{at}.gate_proj", f"{at}.up_proj"]
            gate_up = self.linear(names, (inner, inner), hidden, bias)
        down = self.linear([f"{at}.down_proj"], (hidden,), inner, bias)
        return GatedMLP(gate_up, down, activation)

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
        hidden, inner = self.shape.hidden_size, self.mixture.width
        tensors = ExpertTensors(self._weights, at, modules, hidden, inner)
        gate_up, down = map(tensors.gate_up, range(count)), map(tensors.down, range(count))
        return Experts(
            router=self.router(f"{at}.{modules.router}", count, modules.have_bias),
            routing=routing,
            gate_up=make.experts(gate_up, count, tensors.gate_up_biases(count)),
            down=make.experts(down, count, tensors.down_biases(count)),
            tokens_X=torch.zeros(count, dtype=torch.int64, device=self._weights.device),
            **more,
        )

    def mlp(self, up: str, down: str, bias: bool, activation: Activation) -> MLP[L]:
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        return MLP(
            self.linear([up], (inner,), hidden, bias),
            self.linear([down], (hidden,), inner, bias),
            activation,
        )

    def _ungrouped(self, rows: Tensor) -> Tensor:
        """All queries' numbers of rows, then all keys', then all values'."""
        shape = self.shape
        group = shape.num_heads // shape.num_kv_heads
        heads = rows.view(shape.num_kv_heads, group + 2, shape.head_dim)
        q, k, v = heads[:, :group], heads[:, group], heads[:, group + 1]
        return torch.cat((q.flatten(), k.flatten(), v.flatten()))

    def _turned(self, rows: Tensor, rope: RopeSpec | None) -> Tensor:
        """Numbers of rows with those of q and k in the order in which kernels rotate."""
        if rope is None or rope.is_plain:
            return rows
        num_rotated = (self.shape.num_heads + self.shape.num_kv_heads) * self.shape.head_dim
        return torch.cat((rope.in_order(rows[:num_rotated]), rows[num_rotated:]))

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
        """The whole model; layers are made of where their names begin, `more` is `Decoder`'s.

        Raises ModelError for tensors that are left over.
        """
        shape, weights = self.shape, self._weights
        size = (shape.vocab_size, shape.hidden_size)
        embedding = Embedding(weights.take(f"{names.embedding}.weight", size), embedding_scale)
        layers = tuple(make_layer(f"{names.layers}.{n}") for n in range(shape.num_layers))
        final_norm = self.norm(names.norm, norm)
        tied = shape.tie_word_embeddings
        has_head = self.needs_head or tied or weights.has(names.head)
        bias_V = None
        if head_bias and has_head:
            bias_V = weights.stack([f"{names.head}.bias"], size[:1])
        if not has_head:
            head = self._add(embedding.weight_VE, None)
        elif tied:
            weights.skip(f"{names.head}.")
            head = self._add(weights.tied_head(embedding.weight_VE), bias_V)
        else:
            head = self._add(weights.head(names.head, size), bias_V)
        weights.finish()
        return Decoder(
            shape,
            embedding,
            layers,
            tuple(self._mixers),
            tuple(self._linears),
            final_norm,
            head,
            has_head,
            **more,
        )


def in_order(weight: Weight, rows: Tensor) -> Weight:
    """These rows of a weight."""
    return weight.rows(rows) if isinstance(weight, Packed) else weight[rows.to(weight.device)]
