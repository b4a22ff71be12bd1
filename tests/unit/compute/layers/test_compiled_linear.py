"""Products by compiled kernels are those of the numbers that weights stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from services.compute.layers import compiled_linear
from services.compute.layers.compiled_linear import ByRows, CompiledLinears
from services.compute.layers.cpu_linear import FEW_ROWS
from services.compute.quantization.packed import Packed, Weight

BFLOAT16 = torch.bfloat16


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def codes(inputs: int) -> Packed:
    codes_OB = torch.randint(-127, 128, (50, inputs), dtype=torch.int8)
    return Packed("int8", codes_OB, torch.rand(50, 1).bfloat16())


def numbers(weight: Weight) -> Tensor:
    return weight.dense(torch.float64) if isinstance(weight, Packed) else weight.double()


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
@pytest.mark.parametrize("inputs", [24, 160])
@pytest.mark.parametrize("kind", ["codes", "numbers"])
def test_few_rows_are_multiplied_exactly(kind: str, inputs: int, rows: int, threads: int) -> None:
    torch.manual_seed(0)
    weight = codes(inputs) if kind == "codes" else torch.randn(50, inputs).bfloat16()
    bias, x = torch.randn(50).bfloat16(), torch.randn(2 * rows, inputs).bfloat16()[::2]
    linear = CompiledLinears(BFLOAT16, keep_dense=True)(weight, bias)
    exact = x.double() @ numbers(weight).T + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.02)
    assert torch.get_num_threads() == threads


def test_without_room_numbers_are_kept_once() -> None:
    weight = torch.randn(50, 24).bfloat16()
    assert not isinstance(CompiledLinears(BFLOAT16, keep_dense=False)(weight, None), ByRows)
    assert isinstance(CompiledLinears(BFLOAT16, keep_dense=True)(weight, None), ByRows)


def test_where_kernels_would_have_one_thread_of_several_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(compiled_linear, "num_threads", lambda: 1)
    assert not isinstance(CompiledLinears(BFLOAT16, keep_dense=True)(codes(24), None), ByRows)
