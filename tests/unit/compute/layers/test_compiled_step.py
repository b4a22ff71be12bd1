"""A step of compiled kernels is one of plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from services.compute.distributed.ranks import ALONE
from services.compute.layers.compiled_step import MOST_ROWS, CompiledStep, CompiledSteps
from services.compute.layers.eager_step import EagerStep, RopeTables, StepMaker
from services.compute.layers.parts import Activation, Attention, Hidden
from services.compute.layers.rope import RopeSpec
from services.compute.layers.weighted_layers import Linear, LinearMap, Norm

HEADS, KV_HEADS, WIDTH = 3, 1, 16
ATTENTION: Attention[LinearMap] = Attention(
    0, HEADS, KV_HEADS, WIDTH, torch.clone, torch.clone, WIDTH**-0.5, RopeSpec(WIDTH, WIDTH)
)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class Kept:
    """Attention that keeps what it is given."""

    def __init__(self, rows: int) -> None:
        self.positions_T = torch.from_numpy(np.arange(rows) * 5)

    def attend(
        self, layer: int, q_THD: Tensor, kv_T2KD: Tensor, softcap: float, sinks_H: Tensor | None
    ) -> Tensor:
        return torch.cat((q_THD.flatten(1), kv_T2KD.flatten(1)), 1)


def steps(rows: int, dtype: torch.dtype) -> list[EagerStep]:
    """The same one, by each maker."""
    torch.manual_seed(0)
    tables = RopeTables([ATTENTION], 512, dtype)
    makers: tuple[StepMaker, ...] = (EagerStep, CompiledSteps())
    tokens_T = torch.zeros(rows, dtype=torch.int64)
    return [make(tokens_T, Kept(rows), tables, ALONE) for make in makers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["rms", "rms by floats", "layer"])
def test_a_sum_waits_for_the_norm_behind_it(
    dtype: torch.dtype, rows: int, scale: float, kind: str
) -> None:
    weight = torch.randn(96).to(torch.float32 if kind == "rms by floats" else dtype)
    norm = Norm(weight, 1e-5, "layer" if kind == "layer" else "rms")
    x, *deltas = torch.randn(3, rows, 96).to(dtype)
    streams = []
    for step in steps(rows, dtype):
        hidden = Hidden(x.clone())
        values = []
        for delta, behind in zip(deltas, (None, norm), strict=True):
            step.add(hidden, delta.clone(), behind, scale)
            values.append(step.computed(step.normed(hidden, norm)).clone())
        step.add(hidden, deltas[0].clone(), None, scale)
        step.settle(hidden)
        streams.append([*values, hidden.x_TE])
    for theirs, ours in zip(*streams, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_what_is_gated_is_the_same(dtype: torch.dtype, activation: Activation) -> None:
    x, gate_up = torch.randn(3, 40).to(dtype), Linear(torch.randn(2 * 72, 40).to(dtype))
    x[0] *= 20
    theirs, ours = (step.gated(x, gate_up, activation) for step in steps(3, dtype))
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_turn_alike(dtype: torch.dtype) -> None:
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * WIDTH).to(dtype)
    theirs, ours = (step.attend(qkv.clone(), ATTENTION) for step in steps(4, dtype))
    torch.testing.assert_close(ours, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_many_rows_are_for_torch_and_its_threads() -> None:
    tables = RopeTables([ATTENTION], 512, torch.float32)
    for rows, kind in ((MOST_ROWS, CompiledStep), (MOST_ROWS + 1, EagerStep)):
        tokens = torch.zeros(rows, dtype=torch.int64)
        assert type(CompiledSteps()(tokens, Kept(rows), tables, ALONE)) is kind


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_have_the_norms_that_they_have_in_torch(weights: torch.dtype, rows: int) -> None:
    torch.manual_seed(1)
    q_norm, k_norm = (Norm(torch.randn(WIDTH).to(weights), 1e-5) for _ in range(2))
    attention = replace(ATTENTION, q_norm=q_norm, k_norm=k_norm)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * WIDTH).bfloat16()
    theirs, ours = (step.attend(qkv.clone(), attention) for step in steps(rows, torch.bfloat16))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
