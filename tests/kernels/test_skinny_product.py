"""One product for every number of rows, whichever kernel computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.compute.kernels.skinny_matmul_config import SkinnyWork
from services.compute.layers.products import SkinnyProduct, suits
from services.compute.layers.weighted_layers import Linear


@pytest.mark.parametrize("num_rows", [1, 2, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in"), [(512, 128), (40, 72)])
def test_every_number_of_rows_is_served(
    device: torch.device, num_rows: int, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((num_rows, num_in), (num_out, num_in), (num_out,))
    )
    product = SkinnyProduct(SkinnyWork.make(num_out, device))
    for linear in (Linear(weight, bias), Linear(weight)):
        out = torch.full((num_rows, num_out), torch.nan, dtype=dtype, device=device)
        product(x, linear, out)
        wide_bias = None if linear.bias_O is None else bias.double()
        expected = F.linear(x.double(), weight.double(), wide_bias)
        bound = 1e-5 if dtype == torch.float32 else 2e-3
        assert float((out.double() - expected).norm() / expected.norm()) < bound


def test_only_few_rows_suit() -> None:
    assert suits(2, 2048, 2048) and suits(64, 128256, 4096)
    assert not suits(1, 2048, 2048) and not suits(65, 2048, 2048)


@pytest.mark.parametrize("num_rows", [1, 2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_are_served_fused_or_not(
    device: torch.device, num_rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    num_gates, num_in = 256, 64
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((num_rows, num_in), (2 * num_gates, num_in), (2 * num_gates,))
    )
    wide = torch.full((num_rows, 2 * num_gates), torch.nan, dtype=dtype, device=device)
    out = torch.full((num_rows, num_gates), torch.nan, dtype=dtype, device=device)
    product = SkinnyProduct(SkinnyWork.make(2 * num_gates, device))
    product.gate_up_silu(x, Linear(weight, bias if has_bias else None), wide, out)
    both = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    expected = F.silu(both[:, :num_gates]) * both[:, num_gates:]
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    assert float((out.double() - expected).norm() / expected.norm()) < bound
