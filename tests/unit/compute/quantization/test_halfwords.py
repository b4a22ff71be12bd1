"""Codes in halfwords are the same codes, where tensor cores' threads find them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from services.compute.layers.weighted_layers import KernelLinears, QuantizedLinear
from services.compute.quantization.at_load import quantized
from services.compute.quantization.halfwords import from_halfwords, to_halfwords
from services.compute.quantization.packed import Packed, Weight

KINDS: tuple[Literal["int4", "fp4"], ...] = ("int4", "fp4")


@pytest.mark.parametrize("is_fp4", [False, True])
def test_all_halfwords_are_those_of_their_codes(is_fp4: bool) -> None:
    halfwords = torch.arange(1 << 16).to(torch.int16).view(-1, 64).view(torch.uint8)
    codes = from_halfwords(halfwords, is_fp4)
    assert codes.shape == (1024, 256) and codes.max() == 15
    assert torch.equal(to_halfwords(codes, is_fp4), halfwords)


@pytest.mark.parametrize("is_fp4", [False, True])
def test_a_halfword_has_inputs_eight_apart(is_fp4: bool) -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, [35, 43, 51, 59]] = 15
    found = to_halfwords(codes, is_fp4).view(torch.int16).flatten()
    assert found.nonzero().flatten().tolist() == [8 + 3]


def packed(kind: Literal["int4", "fp4"]) -> Packed:
    return quantized(torch.randn(6, 128, generator=torch.Generator().manual_seed(0)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_in_halfwords_stands_for_the_same_numbers(
    kind: Literal["int4", "fp4"],
) -> None:
    expected = packed(kind).dense(torch.float32)
    weight = packed(kind).with_halfwords()
    assert torch.equal(weight.dense(torch.float32), expected)
    assert torch.equal(weight.rows(slice(2, 4)).dense(torch.float32), expected[2:4])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_gpu_have_codes_of_4_bits_in_halfwords(
    kind: Literal["int4", "fp4"],
) -> None:
    weights: list[Weight] = [packed(kind), packed(kind)]
    (linear,) = KernelLinears(torch.bfloat16, keeps_dense=False).experts(weights, 2, None)
    assert isinstance(linear, QuantizedLinear) and linear.weight.in_halfwords
    both = torch.cat([packed(kind).dense(torch.float32) for _ in weights])
    assert torch.equal(linear.weight.dense(torch.float32), both)
