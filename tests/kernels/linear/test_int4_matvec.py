"""One row times 4 bits on Hopper's tensor cores: what is float64's, and where it is not for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.int4_matvec import int4_matvec, int4_row_config, walks_over
from services.compute.kernels.linear.quantized_matmul_config import row_form
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows
from services.compute.layers.products import ProductByRows
from services.compute.layers.quantized_product import PackedWork, QuantizedProduct, RowOfNumbers
from services.compute.layers.weighted_layers import QuantizedLinear
from services.compute.quantization.packed import Packed
from tests.kernels.one_row import poisoned, row_of, seed
from tests.kernels.packed_weights import assert_rounded_once, random_packed

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")

DTYPES = [torch.bfloat16, torch.float16]
# warps that have whole chunks, some that have less and some that have none; quads that programs
# share unevenly
SHAPES = [(6144, 4096), (1056, 8192), (4100, 5120), (4, 896), (4096, 11008), (3584, 18944)]
WIDE = [(5120, 13824), (4096, 14336), (1056, 28672), (1056, 32768)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


def weight_of(
    num_out: int, num_in: int, *, group: int = 128, zeros: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Packed:  # fmt: skip
    """With scales and zeros of this dtype."""
    weight = random_packed("int4", num_out, num_in, group, zeros, torch.device("cuda"))
    zeros_OG = None if weight.zeros_OG is None else weight.zeros_OG.to(dtype)
    weight = replace(weight, scales_OG=weight.scales_OG.to(dtype), zeros_OG=zeros_OG)
    return weight.with_adjacent_rows()


def codes_of(x: Tensor, weight: Packed, *, pdl: bool = False) -> QuantizedRows:
    form = row_form(weight, 1)
    assert form is not None
    rows = QuantizedRows.empty(form, *x.shape, x.device)
    quantize_rows(x, rows, pdl=pdl)
    return rows


def multiply(x: Tensor, weight: Packed, bias: Tensor | None, *, pdl: bool = False) -> Tensor:
    """The product, which is tested by the numbers that the row's codes stand for."""
    rows, out = codes_of(x, weight), poisoned(len(weight.codes_OB), x)
    int4_matvec(rows, weight, bias, out, int4_row_config(weight.num_inputs), pdl=pdl)
    assert_rounded_once(out, rows.dense(), weight.dense(torch.float64), bias)
    return out


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_row_is_multiplied(dtype: torch.dtype, pdl: bool, zeros: bool) -> None:
    for number, (num_out, num_in) in enumerate([*SHAPES, *WIDE]):
        weight = weight_of(num_out, num_in, zeros=zeros)
        x = row_of(num_in, dtype, torch.device("cuda"))
        bias = row_of(num_out, dtype, x.device)[0] if number % 2 else None
        multiply(x, weight, bias, pdl=pdl)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_and_zeros_are_of_any_dtype(dtype: torch.dtype) -> None:
    x = row_of(4096, torch.bfloat16, torch.device("cuda"))
    multiply(x, weight_of(4096, 4096, zeros=True, dtype=dtype), None)


@on_hopper
@pytest.mark.parametrize("group", [256, 1024])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)])
def test_a_group_may_be_of_several_parts(group: int, shape: tuple[int, int]) -> None:
    x = row_of(shape[1], torch.bfloat16, torch.device("cuda"))
    multiply(x, weight_of(*shape, group=group, zeros=True), None)


@on_hopper
def test_launches_that_begin_early_wait_for_what_they_read() -> None:
    """Rows that become codes, and products of these, one behind the other."""
    weights = [weight_of(4096, 4096, zeros=True) for _ in range(4)]

    def chain(*, pdl: bool) -> Tensor:
        x = row_of(4096, torch.bfloat16, torch.device("cuda"))
        for weight in weights * 5:
            out = torch.empty_like(x)
            config = int4_row_config(4096)
            int4_matvec(codes_of(x, weight, pdl=pdl), weight, None, out, config, pdl=pdl)
            x = out
        return x

    seed()
    expected = chain(pdl=False)
    seed()
    assert torch.equal(chain(pdl=True), expected)
    assert expected.isfinite().all()


@on_hopper
def test_it_serves_the_layer() -> None:
    """A layer's product of one row is this kernel's, to the last bit."""
    weight, x = (
        weight_of(4096, 4096, zeros=True),
        row_of(4096, torch.bfloat16, torch.device("cuda")),
    )
    bias, out = row_of(4096, torch.bfloat16, x.device)[0], poisoned(4096, x)
    skinny = SkinnyWork.make(4096, x.device)
    work = PackedWork(skinny, torch.empty(4096 * 4096, dtype=x.dtype, device=x.device))
    product = QuantizedProduct(ProductByRows(skinny), work, RowOfNumbers(pdl=True), pdl=True)
    product(codes_of(x, weight), QuantizedLinear(weight, bias_O=bias), out)
    assert torch.equal(out, multiply(x, weight, bias))


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
    rows = codes_of(x, weight)
    out = poisoned(8, x)
    int4_matvec(rows, weight, None, out, int4_row_config(weight.num_inputs))
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
    assert not walks_over(weight_of(8192, 4096).rows(slice(0, 4096)))


def test_it_is_for_hopper() -> None:
    weight = random_packed("int4", 4096, 4096, 128, False, torch.device("cpu"))
    assert not walks_over(weight.with_adjacent_rows())
