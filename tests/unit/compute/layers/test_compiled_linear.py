"""Products by compiled kernels are those of the numbers that weights stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numba
import pytest
import torch
from torch import Tensor

from services.compute.kernels.cpu import dots
from services.compute.kernels.cpu.dots import HAS_AMX, HAS_PAIRS, HAS_VNNI
from services.compute.layers import compiled_linear, cpu_linear
from services.compute.layers.compiled_linear import (
    ByRows,
    CompiledLinears,
    FewRows,
    half_parts,
    number_parts,
)
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


def halves(inputs: int, group_size: int, has_zeros: bool) -> Packed:
    codes_OB = torch.randint(0, 256, (50, inputs // 2), dtype=torch.uint8)
    scales_OG = torch.rand(50, inputs // group_size).half()
    zeros_OG = 8 * torch.rand_like(scales_OG) - 4 if has_zeros else None
    return Packed("int4", codes_OB, scales_OG, zeros_OG)


def halves_of_32(inputs: int) -> Packed:
    return halves(inputs, 32, has_zeros=True)


def numbers(weight: Weight) -> Tensor:
    return weight.dense(torch.float64) if isinstance(weight, Packed) else weight.double()


@pytest.mark.parametrize("rows", [1, FEW_ROWS, 15])
@pytest.mark.parametrize("inputs", [24, 160])
@pytest.mark.parametrize("kind", ["codes", "numbers"])
def test_few_rows_are_multiplied_exactly(
    kind: str, inputs: int, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_linear, "HAS_PAIRS", False)
    if rows > FEW_ROWS:  # kernels have as many on processors without bfloat16
        monkeypatch.setattr(cpu_linear, "has_bf16", lambda: False)
    torch.manual_seed(0)
    weight = codes(inputs) if kind == "codes" else torch.randn(50, inputs).bfloat16()
    bias, x = torch.randn(50).bfloat16(), torch.randn(2 * rows, inputs).bfloat16()[::2]
    linear = CompiledLinears(BFLOAT16, keep_dense=True)(weight, bias)
    exact = x.double() @ numbers(weight).T + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.02)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("rows", [1, 6, 21, 67])
@pytest.mark.parametrize(
    ("inputs", "group_size", "has_zeros"),
    [(192, 32, False), (256, 64, True), (192, 96, True), (256, 256, True), (128, 128, True)],
)
def test_codes_of_4_bits_are_multiplied_exactly_by_codes_of_8(
    inputs: int, group_size: int, has_zeros: bool, rows: int, threads: int
) -> None:
    torch.manual_seed(0)
    weight, bias = halves(inputs, group_size, has_zeros), torch.randn(50).bfloat16()
    x = of_bytes(rows, inputs)
    linear = CompiledLinears(BFLOAT16, keep_dense=False)(weight, bias)
    exact = x.double() @ numbers(weight).T + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.02)


@pytest.mark.skipif(not HAS_VNNI or HAS_AMX, reason="other processors have other products")
@pytest.mark.parametrize("rows", [FEW_ROWS + 1, 21, 67])
@pytest.mark.parametrize("inputs", [32, 160])
def test_many_rows_are_multiplied_exactly_by_codes_of_8_bits(
    inputs: int, rows: int, threads: int
) -> None:
    torch.manual_seed(0)
    weight, bias, x = codes(inputs), torch.randn(50).bfloat16(), of_bytes(rows, inputs)
    linear = CompiledLinears(BFLOAT16, keep_dense=True)(weight, bias)
    exact = x.double() @ numbers(weight).T + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.02)


@pytest.mark.skipif(not HAS_PAIRS or HAS_AMX, reason="other processors have other products")
@pytest.mark.parametrize("rows", [1, 5, 16, 23, 130])
@pytest.mark.parametrize("inputs", [20, 160])
def test_rows_of_bfloat16_are_multiplied_exactly_by_numbers(
    inputs: int, rows: int, threads: int
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(50, inputs).bfloat16(), torch.randn(50).bfloat16()
    x = torch.randn(2 * rows, inputs).bfloat16()[::2]
    linear = CompiledLinears(BFLOAT16, keep_dense=True)(weight, bias)
    assert isinstance(linear, FewRows)  # of any number: the weight is there once
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x).double(), exact, rtol=0.01, atol=0.02)


def test_without_products_of_pairs_their_kernel_is_valid_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No such processor calls it, but it is compiled as it is imported."""
    monkeypatch.setattr(dots, "HAS_PAIRS", False)
    panel = dots._panel_of_pairs(dots.ROWS)
    run = numba.njit(lambda weight, x, out: panel(weight, x, out, 24, dots.PANEL))
    torch.manual_seed(0)
    weight, x = torch.randn(dots.PANEL, 24).bfloat16(), torch.randn(dots.ROWS, 24).bfloat16()
    pairs = x.view(dots.ROWS, 12, 2).transpose(0, 1).contiguous()
    out = torch.empty(dots.ROWS, dots.PANEL, dtype=BFLOAT16)
    parts = number_parts(weight, lambda part: part.contiguous())
    run(parts.weight.data_ptr(), pairs.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=0.01, atol=0.02)


def test_without_an_instruction_that_adds_neighbours_kernels_are_valid_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No such processor calls them, but all that is imported is compiled."""
    monkeypatch.setattr(dots, "HAS_DOTS", False)
    monkeypatch.setattr(dots, "HAS_VNNI", False)
    dot, panel = dots._dots_of_bytes(1), dots._panel_of_halves(1)
    run_dot = numba.njit(lambda weight, x: dot(weight, x, 64)[0])
    run_panel = numba.njit(lambda weight, *at: panel(weight, 0, 0, *at, 64, dots.PANEL, 0))
    torch.manual_seed(0)
    weight = codes(64).codes_OB[0]
    x = torch.randint(-999, 999, (64,), dtype=torch.int16)
    assert run_dot(weight.data_ptr(), x.data_ptr()) == int(weight.long() @ x.long())
    few = halves_of_32(64)
    parts = half_parts(few, lambda part: part.contiguous())
    row, out = of_bytes(1, 64), torch.empty(dots.PANEL, dtype=BFLOAT16)
    steps = row.float().view(2, 32).amax(1) / 127
    row_codes = (row.float().view(2, 32) / steps[:, None]).round()
    tensors = parts.weight, parts.scales, parts.lows, row_codes.to(torch.int8), steps
    sums = row_codes.sum(1) * steps
    run_panel(*(x.data_ptr() for x in (*tensors, sums, out) if x is not None))
    exact = numbers(few)[: dots.PANEL] @ row[0].double()
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.02)


def of_bytes(rows: int, inputs: int) -> Tensor:
    """Rows that are codes of 8 bits times a power of 2 for each 32 inputs."""
    codes = torch.randint(-127, 128, (rows, inputs // 32, 32))
    codes[..., 5] = 127
    steps = 2.0 ** torch.randint(-8, -5, (rows, inputs // 32, 1))
    return (codes * steps).flatten(1).bfloat16()


def test_a_row_beside_4_bits_loses_half_a_step_of_each_32_inputs_at_most() -> None:
    torch.manual_seed(0)
    weight, x = halves(256, 32, has_zeros=True), torch.randn(9, 256).bfloat16()
    x[:, ::50] *= 100  # takes precision from the 31 beside it alone
    found = CompiledLinears(BFLOAT16, keep_dense=False)(weight, None)(x).double()
    steps = x.double().view(9, -1, 32).abs().amax(-1) / 127
    exact = x.double() @ numbers(weight).T
    bound = steps.repeat_interleave(32, 1) / 2 @ numbers(weight).abs().T + exact.abs() / 128
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("make", [lambda: codes(256), lambda: halves(256, 32, False)])
def test_a_row_that_is_not_finite_spoils_no_other(make: Callable[[], Packed]) -> None:
    x = torch.randn(4, 256).bfloat16()
    x[1, 7], x[2, 200] = torch.nan, torch.inf
    finite = CompiledLinears(BFLOAT16, keep_dense=True)(make(), None)(x).isfinite()
    assert finite[[0, 3]].all() and not finite[[1, 2]].any()


@pytest.mark.parametrize("make", [lambda: torch.randn(50, 32).bfloat16(), lambda: codes(32)])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_kernels_multiply_few_rows_or_all_where_torch_has_no_products_of_bfloat16(
    has_bf16: bool, make: Callable[[], Weight], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16", lambda: has_bf16)
    monkeypatch.setattr(compiled_linear, "HAS_PAIRS", False)
    linear = CompiledLinears(BFLOAT16, keep_dense=True)(make(), None)
    assert isinstance(linear, ByRows if has_bf16 else FewRows)


def test_numbers_are_kept_once_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 32).bfloat16()
    monkeypatch.setattr(cpu_linear, "has_bf16", lambda: True)
    monkeypatch.setattr(compiled_linear, "HAS_PAIRS", False)
    assert not isinstance(CompiledLinears(BFLOAT16, keep_dense=False)(weight, None), ByRows)


@pytest.mark.parametrize("make", [lambda n: torch.randn(50, n).bfloat16(), codes, halves_of_32])
@pytest.mark.parametrize("inputs", [128, 768])
@pytest.mark.parametrize("has_pairs", sorted({HAS_PAIRS, False}))
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    has_pairs: bool,
    inputs: int,
    make: Callable[[int], Weight],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16", lambda: False)
    monkeypatch.setattr(compiled_linear, "HAS_PAIRS", has_pairs)
    torch.manual_seed(0)
    few, x = CompiledLinears(BFLOAT16, True)(make(inputs), None), torch.randn(21, inputs).bfloat16()
    alone = torch.cat([few(row[None]) for row in x])
    for count in range(2, len(x) + 1):
        assert torch.equal(few(x[:count]), alone[:count])


def test_where_kernels_would_have_one_thread_of_several_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(compiled_linear, "num_threads", lambda: 1)
    assert not isinstance(CompiledLinears(BFLOAT16, keep_dense=True)(codes(24), None), ByRows)
