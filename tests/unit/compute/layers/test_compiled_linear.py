"""Products by compiled kernels are those of the numbers that codes stand for."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers import compiled_linear
from services.compute.layers.compiled_linear import FEW_ROWS, CompiledInt8Linear, CompiledLinears
from services.compute.quantization.packed import Packed


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("rows", [1, FEW_ROWS])
@pytest.mark.parametrize("inputs", [24, 160])
def test_codes_of_8_bits_are_multiplied_exactly(
    inputs: int, rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (50, inputs), dtype=torch.int8)
    weight = Packed("int8", codes, torch.rand(50, 1).bfloat16())
    bias, x = torch.randn(50).bfloat16(), torch.randn(2 * rows, inputs).bfloat16()[::2]
    monkeypatch.setattr(compiled_linear, "num_threads", lambda: num_threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    linear = CompiledLinears(torch.bfloat16, keep_dense=False)(weight, bias)
    if not isinstance(linear, CompiledInt8Linear):
        pytest.skip("this processor has no kernel for codes")
    exact = x.double() @ weight.dense(torch.float64).T
    torch.testing.assert_close(linear(x).double(), exact + bias.double(), rtol=0.01, atol=0.02)
