"""Linear maps of one row, bf16, beside cuBLAS, and the linear maps of a layer in sequence.

Those with FP8 are in packed.py, and layers of them in matvec_fp8_sweep.py.

Predicted on an H200 (4.5 TB/s; about 2 µs of a launch are not covered by reading):
8B qkv 13, o 9.5, gate/up 54, down 28, head 236 µs; 1B qkv 5, o 4, gate/up 17, down 9.5, head 119.
With dependent launch the 2 µs shrink to about 1.

Widths that are no power of two are padded in registers, not in memory: Qwen2.5-7B's 18944 inputs of
down are 32768 places of which 58 % load, Phi-4's 17920 55 %. Down: 32 and 43 µs at 4.5 TB/s, with 2
of the launch; gate/up 62 and 84.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import Case
from services.compute.kernels.linear.matvec import matvec, norm_gate_up, norm_matvec
from services.compute.kernels.rows.activations import act_mul
from services.compute.kernels.rows.add_norm import NormedInput, add_norm
from services.compute.layers.weighted_layers import Norm

COLD_BYTES = 160 << 20
"""Weights taken in turn: several times the L2 cache of 50 or 60 MB."""

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Model:
    """The widths of a model's linear maps."""

    name: str
    width: int
    qkv: int
    inner: int
    vocabulary: int
    mixed: int = 0  # of the heads together, where it is not the width
    norms_behind: bool = False  # of parts, beside those before them


MODELS = (
    Model("8B", width=4096, qkv=6144, inner=14336, vocabulary=128256),
    Model("1B", width=2048, qkv=3072, inner=8192, vocabulary=128256),
    Model("Qwen2.5-7B", width=3584, qkv=4608, inner=18944, vocabulary=152064),
    Model("Phi-4", width=5120, qkv=7680, inner=17920, vocabulary=100352),
    Model(
        "Gemma-3-4B",
        width=2560,
        qkv=4096,
        inner=10240,
        vocabulary=262208,
        mixed=2048,
        norms_behind=True,
    ),
)


def draw(*shape: int) -> Tensor:
    """Normal values, scaled as weights of the last dimension's width."""
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return values.mul_(shape[-1] ** -0.5) if shape[0] > 4 else values


def cold_weights(num_out: int, num_in: int) -> list[Tensor]:
    """As many weights as make every read one from memory."""
    copies = max(2, -(-COLD_BYTES // (2 * num_out * num_in)))
    return [draw(num_out, num_in) for _ in range(copies)]


def cases() -> Iterator[Case]:
    """Single maps, then layers."""
    for model in MODELS:
        yield from _maps(model)
    for model in MODELS:
        yield from _layers(model)


def _maps(model: Model) -> Iterator[Case]:
    width, inner = model.width, model.inner
    yield from _normed(f"{model.name} qkv", model.qkv, width)
    yield from _plain(f"{model.name} o", width, model.mixed or width)
    yield from _gated(f"{model.name} gate/up", inner, width)
    yield from _plain(f"{model.name} down", width, inner)
    yield from _plain(f"{model.name} head", model.vocabulary, width)


def _case(name: str, weights: list[Tensor], call: Callable[[Tensor], None]) -> Case:
    def bound(weight: Tensor) -> Callable[[], None]:
        return lambda: call(weight)

    num_out, num_in = weights[0].shape
    return Case(
        f"{name} {num_out}x{num_in}",
        [bound(weight) for weight in weights],
        num_bytes=2.0 * (num_out * num_in + (num_in + num_out)),
        flops=2.0 * num_out * num_in,
    )


def _plain(name: str, num_out: int, num_in: int) -> Iterator[Case]:
    weights, x = cold_weights(num_out, num_in), draw(1, num_in)
    out = torch.empty(1, num_out, device="cuda", dtype=x.dtype)
    yield _case(f"{name} F.linear", weights, lambda w: F.linear(x, w))
    for pdl in (False, True):
        tag = " pdl" if pdl else ""
        yield _case(
            f"{name} matvec{tag}",
            weights,
            lambda w, pdl=pdl: matvec(x, w, None, out, pdl=pdl),
        )


def _normed(name: str, num_out: int, num_in: int) -> Iterator[Case]:
    weights, x, delta = cold_weights(num_out, num_in), draw(1, num_in), draw(1, num_in)
    normed = NormedInput(x, delta, Norm(draw(num_in), EPS), torch.empty_like(x))
    out = torch.empty(1, num_out, device="cuda", dtype=x.dtype)
    yield _case(f"{name} F.linear", weights, lambda w: F.linear(x, w))
    for pdl in (False, True):
        tag = " pdl" if pdl else ""
        yield _case(
            f"{name} norm_matvec{tag}",
            weights,
            lambda w, pdl=pdl: norm_matvec(normed, w, None, out, pdl=pdl),
        )


def _gated(name: str, inner: int, num_in: int) -> Iterator[Case]:
    weights, x, delta = cold_weights(2 * inner, num_in), draw(1, num_in), draw(1, num_in)
    normed = NormedInput(x, delta, Norm(draw(num_in), EPS), torch.empty_like(x))
    out = torch.empty(1, inner, device="cuda", dtype=x.dtype)
    yield _case(f"{name} F.linear", weights, lambda w: F.linear(x, w))
    for pdl in (False, True):
        tag = " pdl" if pdl else ""
        yield _case(
            f"{name} norm_gate_up{tag}",
            weights,
            lambda w, pdl=pdl: norm_gate_up(normed, w, out, "silu", pdl=pdl),
        )


class Layer:
    """The linear maps of one layer; attention is left out: its output is taken to be q."""

    def __init__(self, model: Model) -> None:
        width, inner = model.width, model.inner
        mixed = model.mixed or width
        self.qkv, self.out = draw(model.qkv, width), draw(width, mixed)
        self.gate_up, self.down = draw(2 * inner, width), draw(width, inner)
        self.norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self.x, self.delta, self.sum = (draw(1, width).mul_(0.1) for _ in range(3))
        self.normed = torch.empty_like(self.x)
        self.mixed = draw(1, model.qkv)
        self.wide, self.gated = draw(1, 2 * inner), draw(1, inner)
        self.heads = self.mixed[:, :mixed]

    @property
    def num_bytes(self) -> float:
        return 2.0 * sum(w.numel() for w in (self.qkv, self.out, self.gate_up, self.down))

    def torch_only(self) -> None:
        """cuBLAS and torch's own norm, additions and gate."""
        width = self.norm.shape
        mixed = F.linear(F.rms_norm(self.x, width, self.norm, EPS), self.qkv)
        self.x.add_(F.linear(mixed[:, : self.out.shape[1]], self.out))
        wide = F.linear(F.rms_norm(self.x, width, self.norm, EPS), self.gate_up)
        gate, up = wide.chunk(2, dim=-1)
        self.x.add_(F.linear(F.silu(gate).mul_(up), self.down))

    def separate(self) -> None:
        """cuBLAS between this repository's element-wise kernels."""
        norm = Norm(self.norm, EPS)
        add_norm(self.x, self.delta, norm, self.normed)
        torch.mm(self.normed, self.qkv.t(), out=self.mixed)
        torch.mm(self.heads, self.out.t(), out=self.delta)
        add_norm(self.x, self.delta, norm, self.normed)
        torch.mm(self.normed, self.gate_up.t(), out=self.wide)
        act_mul(self.wide, self.gated, "silu")
        torch.mm(self.gated, self.down.t(), out=self.delta)

    def fused(self, pdl: bool) -> None:
        """Four launches."""
        x, delta, total = self.x, self.delta, self.sum
        norm = Norm(self.norm, EPS)
        normed = NormedInput(x, delta, norm, total)
        norm_matvec(normed, self.qkv, None, self.mixed, pdl=pdl)
        matvec(self.heads, self.out, None, delta, pdl=pdl)
        normed = NormedInput(total, delta, norm, self.normed)
        norm_gate_up(normed, self.gate_up, self.gated, "silu", pdl=pdl)
        matvec(self.gated, self.down, None, delta, pdl=pdl)


def _layers(model: Model) -> Iterator[Case]:
    layers = [Layer(model) for _ in range(3)]

    def chain(name: str, runs: list[Callable[[], None]]) -> Case:
        num_bytes = layers[0].num_bytes
        return Case(f"{model.name} layer chain {name}", runs, num_bytes, flops=num_bytes)

    yield chain("torch", [layer.torch_only for layer in layers])
    yield chain("cuBLAS, own norm and silu", [layer.separate for layer in layers])
    yield chain("fused", [lambda layer=layer: layer.fused(False) for layer in layers])
    yield chain("fused pdl", [lambda layer=layer: layer.fused(True) for layer in layers])
