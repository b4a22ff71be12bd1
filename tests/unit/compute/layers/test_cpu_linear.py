"""Linear maps on the CPU equal the plain ones, whichever kernel has them."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers.cpu_linear import (
    FEW_ROWS,
    FEW_ROWS_INT4,
    CpuLinears,
    Int4Linear,
    Int8Linear,
)
from services.compute.layers.weighted_layers import Linear
from services.compute.quantization.at_load import Quantization, quantized
from services.compute.quantization.packed import Packed, halves

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
@pytest.mark.parametrize("kind", ["fp8", "int8"])
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


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_codes_of_8_bits_may_have_any_number_of_inputs(rows: int) -> None:
    codes = torch.randint(-127, 128, (48, 24), dtype=torch.int8)
    weight = Packed("int8", codes, torch.ones(48, 1))
    x = torch.randn(rows, 24).bfloat16()
    linear = CpuLinears(torch.bfloat16, keep_dense=False)(weight, None)
    expected = x.float() @ codes.float().T
    torch.testing.assert_close(linear(x).float(), expected, rtol=0.02, atol=10)


def int4(
    rows: int, inputs: int, groups: int, zeros: bool = True, order: torch.Tensor | None = None
) -> Packed:
    codes = torch.randint(16, (rows, inputs), dtype=torch.uint8)
    scales = torch.rand(rows, groups) + 0.1
    zeros_OG = torch.randint(-8, 8, (rows, groups)).half() if zeros else None
    return Packed("int4", halves(codes), scales.half(), zeros_OG, order)


INT4 = {
    "groups that the kernel has": lambda: int4(48, 256, 4),
    "groups of three of its own": lambda: int4(48, 288, 3),
    "whole rows": lambda: int4(32, 768, 1),
    "no zeros": lambda: int4(64, 128, 4, zeros=False),
    "inputs in another order": lambda: int4(48, 128, 4, order=torch.randperm(128)),
    "groups of 16": lambda: int4(48, 64, 4),
    "rows that are not whole blocks": lambda: int4(40, 64, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("case", INT4)
@pytest.mark.parametrize("rows", [1, FEW_ROWS_INT4, FEW_ROWS_INT4 + 1, 40])
def test_codes_of_4_bits_are_the_numbers_that_they_stand_for(
    case: str, keep_dense: bool, rows: int, dtype: torch.dtype
) -> None:
    weight = INT4[case]()
    bias, x = torch.randn(weight.shape[0]).to(dtype), torch.randn(rows, weight.num_inputs).to(dtype)
    linear = CpuLinears(dtype, keep_dense)(weight, bias)
    if dtype == torch.bfloat16 and not isinstance(linear, Int4Linear):
        assert case in ("groups of 16", "rows that are not whole blocks") or not has_vectors()
    dense = weight.dense(torch.float32)
    expected = x.float() @ dense.T + bias.float()
    if dtype == torch.float32:
        torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)
        return
    # scale, zero times scale and the result are each rounded by 2^-9 at most
    off = x.float().norm(dim=1, keepdim=True) * dense.abs().amax(1) * 2**-7
    assert ((linear(x).float() - expected).abs() <= 2 * off + expected.abs() * 2**-7).all()


def has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def test_without_room_for_a_second_copy_all_rows_are_multiplied_in_4_bits() -> None:
    linear = CpuLinears(torch.bfloat16, keep_dense=False)(int4(48, 64, 2), None)
    if not isinstance(linear, Int4Linear):
        pytest.skip("this processor has no kernel for codes of 4 bits")
    held = {name: value for name, value in vars(linear).items() if isinstance(value, torch.Tensor)}
    assert sum(tensor.nbytes for tensor in held.values()) == 48 * 64 // 2 + 48 * 2 * 2 * 2
    assert linear._many_rows is None
