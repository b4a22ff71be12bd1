"""Activations, with a gate and without: against float64 and against torch's own rounding."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from services.compute.kernels.rows.activations import (
    act_mul,
    act_mul_reference,
    activate,
    activate_reference,
)
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm, quantize_rows
from services.compute.layers.parts import Activation

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def _check(out: Tensor, expected: Tensor, same_dtype: Tensor, activation: Activation) -> None:
    dtype = out.dtype
    assert float((out.cpu().double() - expected).norm() / expected.norm()) <= BOUNDS[dtype]
    # the last bit may differ where float32 exponentials do, and in the product then, too
    if dtype == torch.bfloat16 and out.device.type != "cuda":
        return  # the interpreter cuts bf16 off where the GPU rounds to nearest
    # torch's gelu cancels where 1 + tanh, or 1 + erf, is near 0
    rtol = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 5e-6
    torch.testing.assert_close(out.cpu(), same_dtype, rtol=rtol, atol=1e-5)
    if dtype != torch.float32:
        share = 0.01 if activation in ("silu", "relu2") else 0.03
        differ = (out.cpu() != same_dtype) & (same_dtype.abs() > 1e-3)
        assert int(differ.sum()) <= share * out.numel()


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 5), (2, 1408), (2, 4864), (1, 14336)])
def test_the_gate_is_the_activation_of_the_first_half(
    tokens: int, width: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = torch.randn(tokens, 2 * width, generator=generator, dtype=torch.float64).abs()
    gate_up = (gate_up * torch.randn(2 * width, generator=generator).sign() * 3).to(dtype)
    gate_up[:, :1] = 1.5  # a width of one must not be a negative number's square
    expected = torch.empty(tokens, width, dtype=torch.float64)
    act_mul_reference(gate_up.double(), expected, activation)
    same_dtype = torch.empty(tokens, width, dtype=dtype)
    act_mul_reference(gate_up, same_dtype, activation)

    out = torch.full((tokens, width), float("nan"), dtype=dtype, device=device)
    act_mul(gate_up.to(device), out, activation)
    _check(out, expected, same_dtype, activation)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_a_gate_it_is_the_activation_alone_and_may_be_in_place(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 3000, generator=generator, dtype=torch.float64) * 3).to(dtype)
    expected = torch.empty(3, 3000, dtype=torch.float64)
    activate_reference(x.double(), expected, activation)
    same_dtype = torch.empty_like(x)
    activate_reference(x, same_dtype, activation)

    out = x.to(device, copy=True)
    activate(out, out, activation)
    _check(out, expected, same_dtype, activation)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates_beyond_the_exponential_are_zero_or_themselves(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 0.0, torch.nan]], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1).to(device)
    out = torch.full((1, 6), 7.0, dtype=dtype, device=device)
    act_mul(gate_up, out, activation)
    expected = torch.tensor([[0.0, 0.0, 200.0, 1e4, 0.0]], dtype=dtype)
    assert torch.equal(out[:, :5].cpu() + 0.0, expected)
    assert bool(out[0, 5].isnan())


def test_a_nan_is_squared_to_a_nan(device: torch.device) -> None:
    x = torch.tensor([[torch.nan, -1.0, 2.0]], device=device)
    activate(x, x, "relu2")
    assert bool(x[0, 0].isnan()) and x[0, 1:].tolist() == [0.0, 4.0]


def test_codes_with_scales_by_groups_are_those_of_the_whole_row(device: torch.device) -> None:
    """As several programs make them: each has a part of the row, of its scales and of its sums."""
    form = RowForm("int16", by_group=True, halves=True, sum_inputs=32)
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(1, 2 * 4224, generator=generator).bfloat16().to(device)
    plain, rows = torch.empty_like(gate_up[:, :4224]), QuantizedRows.empty(form, 1, 4224, device)
    act_mul(gate_up, plain, "silu")
    act_mul(gate_up, rows, "silu")
    whole = QuantizedRows.empty(form, 1, 4224, device)
    quantize_rows(plain, whole)
    assert torch.equal(rows.scales_TG, whole.scales_TG)
    assert torch.equal(rows.codes_TPI, whole.codes_TPI)
    assert torch.equal(rows.sums_TN, whole.sums_TN)
