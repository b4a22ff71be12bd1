"""Steps of models whose weights are of several kinds, beside the same models with dense weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.linear import matvec_config
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs
from services.compute.layers import kernel_step
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_ranks import OneRank
from services.compute.layers.kernel_step import (
    KernelDevice,
    KernelStep,
    LayerCache,
    StreamBuffers,
)
from services.compute.layers.products import ProductByRows
from services.compute.layers.quantized_product import PackedWork, QuantizedProduct, RowOfNumbers
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import AnyLinear, Linear, QuantizedLinear
from services.compute.models.decoder import Decoder
from services.compute.models.families import read_config
from services.compute.models.weights import DummyWeights
from services.compute.quantization.packed import Packed, Weight
from tests.kernels.packed_weights import random_packed
from tests.kernels.recorded_step import RAW as SMALL

WIDTH, INNER = 256, 384
RAW: dict[str, Any] = SMALL | {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
DTYPE, BOUND = (torch.bfloat16, 3e-2) if torch.cuda.is_available() else (torch.float32, 1e-3)
FP8, BLOCKS, INT4, DENSE = "fp8", "fp8 by 128", "int4", "dense"
MIXES: dict[str, tuple[str, ...]] = {  # of the linear maps, in turn; a layer has four
    "FP8": (FP8,),
    "FP8 and some of 16 bits": (FP8, FP8, FP8, FP8, DENSE),
    "16 bits and INT4": (DENSE, INT4, INT4),
    "FP8 by rows and by blocks": (FP8, BLOCKS, BLOCKS),
    "FP8 for the gates alone": (INT4, INT4, FP8, DENSE),
    "all": (FP8, INT4, DENSE, BLOCKS, FP8),
}


class Queries:
    """In the place of attention: what it mixes are the queries."""

    def plan(self, num_tokens: int) -> None: ...

    def attend(self, call: AttentionCall) -> None:
        call.out_THD.copy_(call.q_THD)


@pytest.fixture(autouse=True)
def few_programs(device: torch.device) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if device.type != "cuda":
            patch.setattr(matvec_config, "MIN_PROGRAMS", 16)
        yield


def packed_of(kind: str, weight_OI: Tensor, device: torch.device) -> Weight:
    if kind == DENSE:
        return weight_OI
    group = {FP8: 0, BLOCKS: 128, INT4: 128}[kind]
    packed = random_packed(
        "int4" if kind == INT4 else "fp8", *weight_OI.shape, group, False, device
    )
    return replace(packed, scales_OG=packed.scales_OG * 4).with_adjacent_rows()


class Maps(NamedTuple):
    """Makes the maps of a dense model."""

    make: Callable[[Tensor, Tensor | None], AnyLinear]

    def __call__(
        self, weight: Tensor, bias_O: Tensor | None, dense_OI: Tensor | None = None
    ) -> AnyLinear:
        return self.make(weight, bias_O)

    def summed(self, weight: Tensor, bias_O: Tensor | None, num_inputs: int) -> AnyLinear:
        return self.make(weight, bias_O)


def decoders_of(
    mix: Sequence[str], device: torch.device
) -> tuple[Decoder[AnyLinear], Decoder[AnyLinear]]:
    """With weights of these kinds, and with the numbers that they stand for."""
    made: list[Weight] = []
    kinds = cycle(mix)

    def as_mixed(weight: Tensor, bias_O: Tensor | None) -> AnyLinear:
        made.append(packed_of(next(kinds), weight, device))
        last = made[-1]
        return QuantizedLinear(last, bias_O) if isinstance(last, Packed) else Linear(last, bias_O)

    def as_dense(weight: Tensor, bias_O: Tensor | None) -> AnyLinear:
        first = made.pop(0)
        return Linear(first.dense(DTYPE) if isinstance(first, Packed) else first, bias_O)

    weights = DummyWeights(DTYPE, device)
    mixed = read_config(RAW).build(weights, Maps(as_mixed))
    dense = read_config(RAW).build(DummyWeights(DTYPE, device), Maps(as_dense))
    return mixed, replace(dense, embedding=mixed.embedding)


def stream_of(decoder: Decoder[AnyLinear], num_tokens: int, device: torch.device) -> Tensor:
    """What a pass leaves: the stream and what was added last."""
    plain, work = ProductByRows(None), SkinnyWork.make(2 * INNER, device)
    room = torch.zeros(2 * INNER * WIDTH, device=device, dtype=DTYPE)
    quantized = QuantizedProduct(plain, PackedWork(work, room), RowOfNumbers(pdl=False), pdl=False)
    ropes = {
        mixer.rope: RotaryTables(*(table.to(device) for table in mixer.rope.tables(64)))
        for mixer in decoder.mixers
        if mixer.rope is not None
    }
    stream = StreamBuffers.make(4, WIDTH, DTYPE, device)
    inputs = StepInputs.make(4, 4, device)
    inputs.tokens_T.copy_(torch.arange(4))
    kernels = KernelDevice(
        inputs=inputs,
        stream=stream,
        ranks=OneRank(stream.delta_TE),
        scratch=Scratch(DTYPE, device),
        kept=Scratch(DTYPE, device),
        products={Linear: plain, QuantizedLinear: quantized},
        experts=ExpertProduct(plain, Choices(), inputs.counts, invariant=False, pdl=False),
        ropes=ropes,
        query_factors={},
        pdl=False,
    )
    table = torch.zeros(4, 4, dtype=torch.int32, device=device)
    slots = torch.arange(4, dtype=torch.int64, device=device)
    caches = [
        LayerCache(
            LayerPages(torch.zeros(2, 2, 2, 16, 64, device=device, dtype=DTYPE)), table, slots
        )
        for _ in decoder.layers
    ]
    step = KernelStep(kernels, num_tokens, caches, Queries())
    hidden = step.embed(decoder.embedding)
    decoder.forward(hidden, step)
    step.finish(hidden)
    return torch.cat((stream.x_TE[:num_tokens], stream.delta_TE[:num_tokens]))


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("mix", list(MIXES))
def test_a_step_with_weights_of_several_kinds_is_that_with_their_numbers(
    mix: str, num_tokens: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    mixed, dense = decoders_of(MIXES[mix], device)
    found, expected = (stream_of(each, num_tokens, device) for each in (mixed, dense))
    assert expected.std() > 0.1
    assert (found - expected).float().norm() / expected.float().norm() < BOUND


def test_norms_and_activations_of_one_row_of_fp8_are_in_the_launches_of_its_products(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("add_norm", "act_mul", "quantize_rows"):
        monkeypatch.setattr(kernel_step, name, None)
    for mix in ("FP8", "FP8 and some of 16 bits"):
        mixed, _ = decoders_of(MIXES[mix], device)
        assert stream_of(mixed, 1, device).isfinite().all()


def test_only_one_row_of_fp8_by_rows_takes_its_neighbours(device: torch.device) -> None:
    def linear_of(kind: str, has_bias: bool = False) -> QuantizedLinear:
        weight = packed_of(kind, torch.zeros(32, 256), device)
        assert isinstance(weight, Packed)
        return QuantizedLinear(weight, torch.zeros(32, device=device) if has_bias else None)

    plain, room = ProductByRows(None), torch.zeros(32 * 256, device=device)
    work = SkinnyWork.make(32, device)
    fused = QuantizedProduct(
        plain, PackedWork(work, room), RowOfNumbers(pdl=False), pdl=False
    ).fused
    assert fused is not None
    rows = linear_of(FP8)
    assert [n for n in range(1, 70) if fused.can_norm(n, rows, norms_behind=False)] == [1]
    assert [n for n in range(1, 70) if fused.can_gate(n, rows)] == [1]
    assert not fused.can_norm(1, rows, norms_behind=True)
    assert fused.can_norm(1, linear_of(FP8, has_bias=True), norms_behind=False)
    assert not fused.can_gate(1, linear_of(FP8, has_bias=True))
    for kind in (BLOCKS, INT4):
        assert not fused.can_norm(1, linear_of(kind), norms_behind=False)
        assert not fused.can_gate(1, linear_of(kind))
    assert QuantizedProduct(plain, PackedWork(work, room), None, pdl=False).fused is None
