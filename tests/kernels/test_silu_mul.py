"""The gate of the MLP: against float64 and against torch's own rounding."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.silu_mul import silu_mul, silu_mul_reference

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 5), (2, 1408), (2, 4864), (1, 14336)])
def test_the_gate_is_silu_of_the_first_half(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = torch.randn(tokens, 2 * width, generator=generator, dtype=torch.float64).to(dtype)
    gate_up *= 3
    expected = torch.empty(tokens, width, dtype=torch.float64)
    silu_mul_reference(gate_up.double(), expected)
    same_dtype = torch.empty(tokens, width, dtype=dtype)
    silu_mul_reference(gate_up, same_dtype)

    out = torch.full((tokens, width), float("nan"), dtype=dtype, device=device)
    silu_mul(gate_up.to(device), out)

    assert float((out.cpu().double() - expected).norm() / expected.norm()) <= BOUNDS[dtype]
    # silu may differ by the last bit where float32 exponentials do, and the product then, too
    if dtype == torch.bfloat16 and device.type != "cuda":
        return  # the interpreter cuts bf16 off where the GPU rounds to nearest
    rtol = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 5e-6
    tiny = float(torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(out.cpu(), same_dtype, rtol=rtol, atol=tiny)
    if dtype != torch.float32:
        assert int((out.cpu() != same_dtype).sum()) <= 0.01 * out.numel()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_gates_beyond_the_exponential_are_zero_or_themselves(
    dtype: torch.dtype, device: torch.device
) -> None:
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 0.0]], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1).to(device)
    out = torch.full((1, 5), float("nan"), dtype=dtype, device=device)
    silu_mul(gate_up, out)
    expected = torch.tensor([[0.0, 0.0, 200.0, 1e4, 0.0]], dtype=dtype)
    assert torch.equal(out.cpu() + 0.0, expected)
