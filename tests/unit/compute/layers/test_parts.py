"""Layers and parts ask a step for their operations in the order of their architecture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.layers.parts import (
    MLP,
    Activation,
    Attention,
    GatedMLP,
    Hidden,
    Input,
    Normed,
    ParallelLayer,
    SerialLayer,
    Sublayer,
)
from services.compute.layers.rope import RopeSpec
from services.compute.layers.weighted_layers import Embedding, Norm
from services.compute.models.decoder import Decoder


def norm(number: float) -> Norm:
    """A norm that is known by its weight."""
    return Norm(torch.tensor([number]), 1e-5)


class Recorder:
    """A step that writes down what it is asked for; linear maps are their names.

    What it returns is a tensor that is known by the name of the operation.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._names: dict[int, tuple[Tensor, str]] = {}

    def name(self, x: Input | None) -> str:
        if x is None:
            return "-"
        if isinstance(x, Normed):
            return f"normed({self._norm(x.norm)})"
        return self._names[id(x)][1]

    def embed(self, embedding: Embedding) -> Hidden:
        return Hidden(self._made(f"embed({embedding.scale})", "x"))

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        self.log.append(f"norm {self._norm(norm)}")
        return Normed(hidden, norm)

    def computed(self, normed: Normed) -> Tensor:
        return self._made(f"computed {self._norm(normed.norm)}", "n")

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        self.log.append(f"add {scale} * {self._norm(behind)}({self.name(delta_TE)})")

    def settle(self, hidden: Hidden) -> None:
        self.log.append("settle")

    def linear(self, x: Input, linear: str) -> Tensor:
        return self._made(f"{linear}({self.name(x)})", linear)

    def linear_out(self, x: Input, linear: str) -> Tensor:
        return self._made(f"out {linear}({self.name(x)})", linear)

    def gated(self, x: Input, gate_up: str, activation: Activation) -> Tensor:
        return self._made(f"{activation} {gate_up}({self.name(x)})", gate_up)

    def activated(self, x: Input, up: str, activation: Activation) -> Tensor:
        return self._made(f"{activation} {up}({self.name(x)})", up)

    def attend(self, qkv_TC: Tensor, attention: Attention[str]) -> Tensor:
        return self._made(f"attend {attention.layer} {self.name(qkv_TC)}", "mixed")

    def _made(self, entry: str, name: str) -> Tensor:
        self.log.append(entry)
        made = torch.empty(0)
        self._names[id(made)] = made, name
        return made

    def _norm(self, norm: Norm | None) -> str:
        return "-" if norm is None else f"{norm.weight_E.item():g}"


def attention(layer: int = 0) -> Attention[str]:
    return Attention(layer, 4, 2, 8, "qkv", "o", 0.5, RopeSpec(8, 8))


SHAPE = DecoderShape(
    vocab_size=10,
    hidden_size=1,
    intermediate_size=1,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    tie_word_embeddings=False,
)
GATED = GatedMLP("gate_up", "down", "gelu_tanh")


def log_of(layer: SerialLayer[str] | ParallelLayer[str]) -> list[str]:
    step = Recorder()
    hidden = step.embed(Embedding(torch.empty(0)))
    step.log.clear()
    layer(hidden, step)
    return step.log


def test_a_serial_layer_is_a_mixer_and_then_a_feed_forward() -> None:
    layer = SerialLayer(Sublayer(norm(1), attention(3)), Sublayer(norm(2), GATED))
    assert log_of(layer) == [
        "norm 1",
        "qkv(normed(1))",
        "attend 3 qkv",
        "out o(mixed)",
        "add 1.0 * -(o)",
        "norm 2",
        "gelu_tanh gate_up(normed(2))",
        "out down(gate_up)",
        "add 1.0 * -(down)",
    ]
    assert layer.last == (None, 1.0)


def test_norms_behind_the_parts_and_scales_come_with_the_addition() -> None:
    behind = norm(4)
    layer = SerialLayer(
        Sublayer(norm(1), attention(), norm(2), 0.25), Sublayer(norm(3), GATED, behind, 0.5)
    )
    log = log_of(layer)
    assert log[4:6] == ["add 0.25 * 2(o)", "norm 3"]
    assert log[-1] == "add 0.5 * 4(down)"
    assert layer.last == (behind, 0.5)


def test_a_sublayer_without_a_norm_takes_the_stream_as_it_is() -> None:
    layer = SerialLayer(Sublayer(None, attention(), norm(1)), Sublayer(None, GATED, norm(2)))
    assert log_of(layer) == [
        "norm -",
        "qkv(normed(-))",
        "attend 0 qkv",
        "out o(mixed)",
        "add 1.0 * 1(o)",
        "norm -",
        "gelu_tanh gate_up(normed(-))",
        "out down(gate_up)",
        "add 1.0 * 2(down)",
    ]


def test_a_feed_forward_may_have_no_gate() -> None:
    layer = SerialLayer(
        Sublayer(norm(1), attention()), Sublayer(norm(2), MLP("up", "down", "relu2"))
    )
    assert log_of(layer)[-3:] == ["relu2 up(normed(2))", "out down(up)", "add 1.0 * -(down)"]


def test_parallel_parts_read_one_norm_and_the_first_sum_is_settled_before_the_second() -> None:
    """A part's result is overwritten by the next part's."""
    layer = ParallelLayer(norm(1), attention(2), GATED)
    assert log_of(layer) == [
        "norm 1",
        "computed 1",
        "qkv(n)",
        "attend 2 qkv",
        "out o(mixed)",
        "add 1.0 * -(o)",
        "settle",
        "gelu_tanh gate_up(n)",
        "out down(gate_up)",
        "add 1.0 * -(down)",
    ]
    assert layer.last == (None, 1.0)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_decoder_takes_its_layers_in_order(num_layers: int) -> None:
    layers = tuple(
        SerialLayer(Sublayer(norm(2 * n), attention(n)), Sublayer(norm(2 * n + 1), GATED))
        for n in range(num_layers)
    )
    mixers = tuple(attention(n) for n in range(num_layers))
    embedding = Embedding(torch.empty(0), 2.0)
    decoder = Decoder(SHAPE, embedding, layers, mixers, (), norm(99), "head")
    step = Recorder()
    decoder.forward(step.embed(decoder.embedding), step)
    assert step.log[0] == "embed(2.0)"
    assert [line for line in step.log if line.startswith("norm")] == [
        f"norm {number}" for number in range(2 * num_layers)
    ]
