"""Shapes, values and bounds of the tests of one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from services.compute.kernels.linear.matvec import norm_matvec_reference
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.layers.weighted_layers import Norm
from services.compute.quantization.packed import Packed
from tests.kernels.packed_weights import random_packed

ON_GPU = torch.cuda.is_available()
EPS = 1e-5

# the interpreter cuts bf16 off where the GPU rounds to nearest, six times on the longest way
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if ON_GPU else 3e-2, torch.float16: 2e-3}

# outputs, inputs: one block and less, tails of both, more blocks than programs
SMALL_SHAPES = ((8, 64), (33, 160), (37, 40), (19, 896))


def weight_of(num_out: int, num_in: int, device: torch.device) -> Packed:
    weight = random_packed("fp8", num_out, num_in, 0, False, device)
    return replace(weight, scales_OG=weight.scales_OG * (64 * num_in**-0.5))


def seed() -> None:
    """For what is drawn in a test."""
    torch.manual_seed(0)


def row_of(num_in: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(1, num_in, device=device, dtype=torch.float32).to(dtype)


def norm_of(num_in: int, dtype: torch.dtype, device: torch.device, **more: object) -> Norm:
    weight = 1 + row_of(num_in, torch.float32, device)[0] / 10
    return replace(Norm(weight.to(dtype), EPS), **more)


def poisoned(num_out: int, x: Tensor) -> Tensor:
    return torch.full((1, num_out), torch.nan, dtype=x.dtype, device=x.device)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def wide(norm: Norm) -> Norm:
    bias = None if norm.bias_E is None else norm.bias_E.double()
    return replace(norm, weight_E=norm.weight_E.double(), bias_E=bias)


def assert_every_form(
    multiply: Callable[[NormedInput, Packed, Tensor], None], weight: Packed, dtype: torch.dtype
) -> None:
    """Of norms and of additions, whose product is that of the reference."""
    (num_out, num_in), device = weight.shape, weight.codes_OB.device
    x, delta = (row_of(num_in, dtype, device) for _ in range(2))
    bias = row_of(num_in, dtype, device)[0]
    layer = norm_of(num_in, dtype, device, kind="layer", bias_E=bias, round_first=False)
    gemma = norm_of(num_in, torch.float32, device, round_first=False)
    behind = replace(layer, bias_E=None)
    for norm, post, scale in ((layer, None, 0.5), (gemma, gemma, 1.0), (gemma, behind, 0.22)):
        out, total = poisoned(num_out, x), poisoned(num_in, x)
        multiply(NormedInput(x, delta, norm, total, post, scale), weight, out)
        expected = torch.empty(1, num_out, dtype=torch.float64, device=device)
        expected_total = torch.empty(1, num_in, dtype=torch.float64, device=device)
        normed = NormedInput(
            x.double(), delta.double(), wide(norm), expected_total, post and wide(post), scale
        )
        norm_matvec_reference(normed, weight.dense(torch.float64), None, expected)
        assert error(total, expected_total) < BOUNDS[dtype]
        assert error(out, expected) < BOUNDS[dtype]
