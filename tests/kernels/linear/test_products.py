"""One product for every number of rows, whichever kernel computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.linear.hopper_matmul_config import HopperTiling
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.layers.products import InvariantProduct, ProductByRows, suits
from services.compute.layers.weighted_layers import Linear, Norm


def draw(
    device: torch.device, dtype: torch.dtype, rows: int, num_out: int, num_in: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a weight and a bias."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, num_in), (num_out, num_in), (num_out,))
    x, weight, bias = (torch.randn(s, generator=generator) for s in shapes)
    weight /= num_in**0.5
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def exact(x: Tensor, linear: Linear) -> Tensor:
    bias = None if linear.bias_O is None else linear.bias_O.double()
    return F.linear(x.double(), linear.weight_OI.double(), bias)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 2, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), [(512, 128), (40, 72)])
@pytest.mark.parametrize("has_work", [True, False])
def test_every_number_of_rows_is_served(
    device: torch.device,
    num_rows: int,
    dtype: torch.dtype,
    num_out: int,
    num_in: int,
    has_work: bool,
) -> None:
    x, weight, bias = draw(device, dtype, num_rows, num_out, num_in)
    product = ProductByRows(SkinnyWork.make(num_out, device) if has_work else None)
    for linear in (Linear(weight, bias), Linear(weight)):
        out = torch.full((num_rows, num_out), torch.nan, dtype=dtype, device=device)
        product(x, linear, out)
        assert error(out, exact(x, linear)) < (1e-5 if dtype == torch.float32 else 2e-3)


def test_only_few_rows_suit() -> None:
    assert suits(2, 2048, 2048) and suits(64, 128256, 4096)
    assert not suits(1, 2048, 2048) and not suits(65, 2048, 2048)


def test_gates_and_ups_are_one_launch_with_few_rows_of_short_weights_without_biases(
    device: torch.device,
) -> None:
    product = ProductByRows(SkinnyWork.make(512, device))
    weight, bias = torch.zeros(512, 64, device=device), torch.zeros(512, device=device)
    for num_rows, dtype in ((2, torch.float16), (64, torch.bfloat16)):
        assert product.can_gate(num_rows, Linear(weight.to(dtype)))
        assert not product.can_gate(num_rows, Linear(weight.to(dtype), bias.to(dtype)))
        assert not product.can_gate(num_rows, Linear(weight))
        assert not ProductByRows(None).can_gate(num_rows, Linear(weight.to(dtype)))
    assert not product.can_gate(65, Linear(weight.half()))
    for by_rows in (product, ProductByRows(None)):  # one row has a kernel of its own
        assert by_rows.can_gate(1, Linear(weight.half())) and by_rows.can_gate(1, Linear(weight))
        assert not by_rows.can_gate(1, Linear(weight, bias))


def test_gates_and_ups_of_many_rows_are_one_launch_on_hopper(device: torch.device) -> None:
    product = ProductByRows(SkinnyWork.make(512, device), hopper=HopperTiling(5))
    weight = torch.zeros(512, 64, device=device, dtype=torch.bfloat16)
    assert product.can_gate(65, Linear(weight)) and product.can_gate(8192, Linear(weight))
    assert not product.can_gate(65, Linear(weight, weight[:, 0]))
    assert not product.can_gate(65, Linear(weight.float()))
    assert not product.can_gate(65, Linear(weight[:384]))


def test_rows_that_are_to_be_alike_are_gated_by_hopper_where_they_are_many(
    device: torch.device,
) -> None:
    fused = InvariantProduct(hopper=HopperTiling(132)).fused
    assert fused is not None
    linear = Linear(torch.zeros(512, 2048, device=device, dtype=torch.float16))
    assert [n for n in (1, 64, 65, 300) if fused.can_gate(n, linear)] == [65, 300]
    assert not fused.can_gate(65, Linear(linear.weight_OI.float()))
    assert not fused.can_gate(65, Linear(linear.weight_OI[:, :64]))  # sums have other bits
    assert not any(fused.can_norm(n, linear, norms_behind=False) for n in range(70))


def test_a_norm_is_in_the_launch_of_one_row_unless_there_are_two_or_all_rows_are_to_be_alike(
    device: torch.device,
) -> None:
    linear = Linear(torch.zeros(512, 64, device=device))
    for product in (ProductByRows(SkinnyWork.make(512, device)), ProductByRows(None)):
        assert [n for n in range(70) if product.can_norm(n, linear, norms_behind=False)] == [1]
        assert not any(product.can_norm(n, linear, norms_behind=True) for n in range(70))
    assert InvariantProduct().fused is None


@pytest.mark.parametrize("num_rows", [1, 2, 64])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_and_ups_in_one_launch(device: torch.device, num_rows: int, activation: str) -> None:
    x, weight, _ = draw(device, torch.float16, num_rows, 512, 64)
    out = torch.full((num_rows, 256), torch.nan, dtype=torch.float16, device=device)
    product = ProductByRows(SkinnyWork.make(512, device))
    product.gated(x, Linear(weight), activation, out)
    both = exact(x, Linear(weight))
    gate, up = both[:, :256], both[:, 256:]
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert error(out, gate * up) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_row_with_its_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Alone, and with gates and ups; the sum goes where it is told to."""
    x, weight, bias = draw(device, dtype, 1, 512, 64)
    delta, weights, _ = draw(device, dtype, 1, 1, 64)
    delta, sums = delta.flip(1), torch.full_like(x, torch.nan)
    norm = Norm(weights[0], 1e-5)
    product, bound = ProductByRows(None), 1e-5 if dtype == torch.float32 else 4e-3
    total = (x + delta).double()
    normed = F.rms_norm(total, (64,), norm.weight_E.double(), norm.eps)
    out = torch.full((1, 512), torch.nan, dtype=dtype, device=device)
    product.normed(NormedInput(x, delta, norm, sums), Linear(weight, bias), out)
    assert torch.equal(sums, x + delta)
    assert error(out, exact(normed, Linear(weight, bias))) < bound
    inner = torch.full((1, 256), torch.nan, dtype=dtype, device=device)
    product.normed_gated(NormedInput(x, delta, norm, sums), Linear(weight), "silu", inner)
    both = exact(normed, Linear(weight))
    assert error(inner, F.silu(both[:, :256]) * both[:, 256:]) < bound


@pytest.mark.parametrize("num_rows", [1, 20])
def test_an_invariant_product_has_the_same_bits_with_any_number_of_rows(
    device: torch.device, num_rows: int
) -> None:
    x, weight, bias = draw(device, torch.float16, 20, 40, 72)
    outs = []
    for rows in (x[:num_rows], x):
        out = torch.full((len(rows), 40), torch.nan, dtype=torch.float16, device=device)
        InvariantProduct()(rows, Linear(weight, bias), out)
        outs.append(out)
    assert torch.equal(outs[0], outs[1][:num_rows])
    assert error(outs[1], exact(x, Linear(weight, bias))) < 2e-3
