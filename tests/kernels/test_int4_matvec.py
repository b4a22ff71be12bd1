"""One row times 4 bits on Hopper's tensor cores: what is float64's, and where it is not for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.int4_matvec import int4_matvec, int4_row_config, walks_over
from services.compute.kernels.linear.quantized_matmul_config import row_form
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows
from services.compute.quantization.packed import Packed
from tests.kernels.one_row import poisoned, row_of, seed
from tests.kernels.packed_weights import assert_rounded_once, random_packed

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")

DTYPES = [torch.bfloat16, torch.float16]
# warps that have whole chunks, and some that have less; quads that programs share unevenly
SHAPES = [(6144, 4096), (1056, 8192), (4100, 5120), (4, 896), (3584, 18944), (5120, 13824)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


def weight_of(num_out: int, num_in: int, *, group: int = 128, zeros: bool = False) -> Packed:
    device = torch.device("cuda")
    return random_packed("int4", num_out, num_in, group, zeros, device).with_adjacent_rows()


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, *, pdl: bool = False) -> Tensor:
    """The product, which is tested by the numbers that the row's codes stand for."""
    form = row_form(weight, 1)
    assert form is not None
    rows = QuantizedRows.empty(form, *x.shape, x.device)
    quantize_rows(x, rows)
    out = poisoned(len(weight.codes_OB), x)
    int4_matvec(rows, weight, bias, out, int4_row_config(weight), pdl=pdl)
    assert_rounded_once(out, rows.dense(), weight.dense(torch.float64), bias)
    return out


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_is_multiplied(dtype: torch.dtype, pdl: bool, zeros: bool) -> None:
    for number, (num_out, num_in) in enumerate([*SHAPES, (4096, 14336), (1056, 28672)]):
        weight = weight_of(num_out, num_in, zeros=zeros)
        x = row_of(num_in, dtype, torch.device("cuda"))
        bias = row_of(num_out, dtype, x.device)[0] if number % 2 else None
        multiply(x, weight, bias, pdl=pdl)


@on_hopper
@pytest.mark.parametrize("group", [256, 1024])
def test_a_group_may_be_of_several_parts(group: int) -> None:
    x = row_of(4096, torch.bfloat16, torch.device("cuda"))
    multiply(x, weight_of(1056, 4096, group=group, zeros=True), None)


@on_hopper
def test_the_largest_codes_and_inputs_fit() -> None:
    """All of a part's codes and inputs at their ends: sums are integers of 32 bits."""
    for code in (0x00, 0xFF):
        weight = weight_of(8, 4096)
        weight = replace(weight, codes_OB=torch.full_like(weight.codes_OB, code))
        multiply(torch.ones(1, 4096, device="cuda", dtype=torch.bfloat16), weight, None)
        multiply(-torch.ones(1, 4096, device="cuda", dtype=torch.bfloat16), weight, None)


@on_hopper
def test_a_row_with_what_is_no_number_has_none() -> None:
    x = row_of(4096, torch.bfloat16, torch.device("cuda"))
    x[0, 5] = float("nan")
    weight = weight_of(8, 4096)
    form = row_form(weight, 1)
    assert form is not None
    rows = QuantizedRows.empty(form, 1, 4096, x.device)
    quantize_rows(x, rows)
    out = poisoned(8, x)
    int4_matvec(rows, weight, None, out, int4_row_config(weight))
    assert out.isnan().all()


@on_hopper
def test_it_is_for_wide_weights_in_groups_of_whole_parts() -> None:
    assert walks_over(weight_of(4096, 4096))
    assert not walks_over(weight_of(4096, 4096, group=64))
    assert not walks_over(weight_of(4096, 4096, group=0))
    assert not walks_over(weight_of(4098, 4096))
    assert not walks_over(weight_of(4096, 2048))
    assert not walks_over(weight_of(1056, 4096))
    apart = random_packed("int4", 4096, 4096, 128, False, torch.device("cuda"))
    assert not walks_over(apart)


def test_it_is_for_hopper() -> None:
    weight = random_packed("int4", 4096, 4096, 128, False, torch.device("cpu"))
    assert not walks_over(weight.with_adjacent_rows())
