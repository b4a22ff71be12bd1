"""Linear maps on the CPU equal the plain ones, whichever kernel has them."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers.cpu_linear import FEW_ROWS, CpuLinears, Int8Linear
from services.compute.layers.weighted_layers import Linear
from services.compute.quantization.at_load import Quantization, quantized
from services.compute.quantization.packed import Packed

KINDS: tuple[Quantization, ...] = ("fp8", "int8", "int4")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def packed(kind: Quantization) -> Packed:
    weight = quantized(torch.randn(48, 128), kind)
    assert isinstance(weight, Packed)
    return weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 40])
def test_in_float32_a_packed_weight_is_the_numbers_that_it_stands_for(
    kind: Quantization, rows: int
) -> None:
    weight, bias, x = packed(kind), torch.randn(48), torch.randn(rows, 128)
    linear = CpuLinears(torch.float32)(weight, bias)
    torch.testing.assert_close(linear(x), Linear(weight.dense(torch.float32), bias)(x))


@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 40])
def test_in_bfloat16_it_has_codes_of_8_bits(
    kind: Quantization, rows: int, keep_dense: bool
) -> None:
    weight = packed(kind)
    bias, x = torch.randn(48).bfloat16(), torch.randn(rows, 128).bfloat16()
    linear = CpuLinears(torch.bfloat16, keep_dense)(weight, bias)
    if not isinstance(linear, Int8Linear):
        pytest.skip("this processor has no kernel for codes")
    dense = weight.dense(torch.float32)
    expected = x.float() @ dense.T + bias.float()
    # each weight is off by at most 1/254 of its row's largest, the sums by the root of their number
    off = x.float().norm(dim=1, keepdim=True) * dense.abs().amax(1) / 254
    assert ((linear(x).float() - expected).abs() <= 2 * off + expected.abs() * 2**-7 + 0.05).all()
    assert linear(x).shape == (rows, 48)
