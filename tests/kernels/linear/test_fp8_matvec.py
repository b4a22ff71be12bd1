"""One row times FP8 on Hopper's tensor cores: what is float64's, and where it is not for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.fp8_matvec import fp8_matvec, suits
from services.compute.kernels.linear.matvec import (
    matvec,
    norm_gate_up_reference,
    norm_matvec_reference,
)
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.quantization.packed import Packed
from tests.kernels.one_row import (
    BOUNDS,
    assert_every_form,
    error,
    norm_of,
    poisoned,
    row_of,
    seed,
    weight_of,
    wide,
)
from tests.kernels.packed_weights import assert_rounded_once

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")

DTYPES = [torch.bfloat16, torch.float16]
# chunks of a row that are a multiple of the slots, and others; tiles that programs share unevenly
SHAPES = [(1056, 4096), (6144, 5120), (2048, 7168), (10240, 8192)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


def plain(x_TI: Tensor) -> NormedInput:
    return NormedInput(x_TI, None, None, None)


def multiply(
    normed: NormedInput, weight: Packed, bias: Tensor | None, out: Tensor, *,
    gated: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    codes, scales = weight.loadable_OB, weight.scales_OG[:, 0]
    assert suits(codes, normed, out, gated=gated, pdl=True)
    fp8_matvec(normed, codes, scales, bias, out, "silu" if gated else None, pdl=pdl)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pdl", [False, True])
def test_a_row_is_multiplied(dtype: torch.dtype, pdl: bool) -> None:
    device = torch.device("cuda")
    for number, (num_out, num_in) in enumerate([*SHAPES, (4096, 14336), (1056, 28672)]):
        weight, x = weight_of(num_out, num_in, device), row_of(num_in, dtype, device)
        bias = row_of(num_out, dtype, device)[0] if number % 2 else None
        out = poisoned(num_out, x)
        multiply(plain(x), weight, bias, out, pdl=pdl)
        assert_rounded_once(out, x, weight.dense(torch.float64), bias)


@on_hopper
@pytest.mark.parametrize("exponent", [-100, -30, 0, 14, 30, 100])
def test_inputs_of_any_size_are_as_exact(exponent: int) -> None:
    """In float16 most of these would be zero or infinite. Some are much larger than others."""
    device = torch.device("cuda")
    weight, x = weight_of(1056, 4096, device), row_of(4096, torch.bfloat16, device)
    x[0, ::37] *= 1000
    expected, out = poisoned(1056, x), poisoned(1056, x)
    multiply(plain(x), weight, None, expected)
    multiply(plain(x * 2.0**exponent), weight, None, out)
    assert torch.equal(out, expected * 2.0**exponent)
    assert_rounded_once(expected, x, weight.dense(torch.float64), None)


@on_hopper
def test_zeros_are_zero_and_what_is_no_number_stays_so() -> None:
    device = torch.device("cuda")
    weight, x = weight_of(1056, 4096, device), torch.zeros(1, 4096, device=device).bfloat16()
    out = poisoned(1056, x)
    multiply(plain(x), weight, None, out)
    assert not out.any()
    for broken in (torch.nan, torch.inf):
        x[0, 4095] = broken
        multiply(plain(x), weight, None, out)
        assert not out[:, weight.codes_OB[:, 4095].float() != 0].isfinite().any()


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_the_sum_is_in_the_launch(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for number, (num_out, num_in) in enumerate(SHAPES):
        weight, x = weight_of(num_out, num_in, device), row_of(num_in, dtype, device)
        delta = row_of(num_in, dtype, device) if number % 2 == 0 else None
        norm, bias = norm_of(num_in, dtype, device), row_of(num_out, dtype, device)[0]
        out, total = poisoned(num_out, x), poisoned(num_in, x)
        multiply(NormedInput(x, delta, norm, total), weight, bias, out)
        added = x if delta is None else x + delta
        assert torch.equal(total, added)
        expected = torch.empty(1, num_out, dtype=torch.float64, device=device)
        normed = NormedInput(added.double(), None, wide(norm), None)
        norm_matvec_reference(normed, weight.dense(torch.float64), bias.double(), expected)
        assert error(out, expected) < BOUNDS[dtype], (num_out, num_in)


@on_hopper
def test_every_form_of_norm_and_of_addition_is_taken() -> None:
    def by_walking(normed: NormedInput, weight: Packed, out: Tensor) -> None:
        multiply(normed, weight, None, out)

    weight = weight_of(*SHAPES[1], torch.device("cuda"))
    assert_every_form(by_walking, weight, torch.float16)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_ups_have_scales_of_their_own(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for num_gates, num_in in SHAPES:
        weight, x = weight_of(2 * num_gates, num_in, device), row_of(num_in, dtype, device)
        delta, norm = row_of(num_in, dtype, device), norm_of(num_in, dtype, device)
        out, total = poisoned(num_gates, x), poisoned(num_in, x)
        multiply(NormedInput(x, delta, norm, total), weight, None, out, gated=True)
        expected = torch.empty(1, num_gates, dtype=torch.float64, device=device)
        normed = NormedInput((x + delta).double(), None, wide(norm), None)
        norm_gate_up_reference(normed, weight.dense(torch.float64), expected, "silu")
        assert error(out, expected) < BOUNDS[dtype], (num_gates, num_in)


@on_hopper
def test_a_chain_under_dependent_launch_computes_the_same_bits() -> None:
    device, width, inner = torch.device("cuda"), 4096, 14336
    start, norm = (f(width, torch.bfloat16, device) for f in (row_of, norm_of))
    qkv, out = weight_of(width, width, device), weight_of(width, width, device)
    gates, down = weight_of(2 * inner, width, device), weight_of(width, inner, device)

    def chain(pdl: bool, turns: int = 8) -> Tensor:
        x, other = start.clone(), torch.empty_like(start)
        delta, mixed = torch.zeros_like(start), torch.empty_like(start)
        gated = torch.empty(1, inner, dtype=start.dtype, device=device)
        for _ in range(turns):
            multiply(NormedInput(x, delta, norm, other), qkv, None, mixed, pdl=pdl)
            multiply(plain(mixed), out, None, delta, pdl=pdl)
            normed = NormedInput(other, delta, norm, x)
            multiply(normed, gates, None, gated, gated=True, pdl=pdl)
            multiply(plain(gated), down, None, delta, pdl=pdl)
        torch.cuda.synchronize()
        return x + delta

    expected = chain(False)
    assert expected.isfinite().all()
    for _ in range(10):
        assert torch.equal(chain(True), expected)


@on_hopper
def test_products_of_one_row_are_made_so_where_it_suits() -> None:
    device = torch.device("cuda")
    weight, x = weight_of(1056, 4096, device), row_of(4096, torch.bfloat16, device)
    ours, theirs = poisoned(1056, x), poisoned(1056, x)
    multiply(plain(x), weight, None, ours, pdl=True)
    matvec(x, weight, None, theirs, pdl=True)
    assert torch.equal(ours, theirs)


@on_hopper
def test_other_widths_other_numbers_and_heads_are_for_programs_of_one_block() -> None:
    device = torch.device("cuda")

    def taken(
        num_out: int, num_in: int, *, dtype: torch.dtype = torch.bfloat16, **how: bool
    ) -> bool:
        x, out = torch.empty(1, num_in, device=device, dtype=dtype), torch.empty(1, num_out)
        norm = norm_of(num_in, dtype, device) if how.get("normed") else None
        codes = torch.empty(num_out, num_in, dtype=torch.uint8, device="meta")
        normed = NormedInput(x, None, norm, None)
        return suits(codes, normed, out, gated=how.get("gated", False), pdl=how.get("pdl", False))

    assert taken(4096, 4096, pdl=True) and taken(4096, 8192, normed=True)
    assert taken(4096, 28672, pdl=True) and taken(8192, 4096, normed=True, gated=True)
    assert not taken(4096, 4096)
    assert not taken(4096, 14336, normed=True, pdl=True)
    assert not taken(4096, 4608, pdl=True) and not taken(4096, 2048, pdl=True)
    assert not taken(1000, 4096, pdl=True) and not taken(4100, 4096, pdl=True)
    assert not taken(4104, 4096, normed=True, gated=True)
    assert not taken(128256, 4096, pdl=True)
    assert not taken(4096, 4096, dtype=torch.float32, pdl=True)


def test_the_cpu_has_none_of_it() -> None:
    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    codes = torch.zeros(1, 4096, dtype=torch.uint8).expand(4096, 4096)
    assert not suits(codes, plain(x), torch.empty(1, 4096), gated=False, pdl=True)
