"""Norms, linear maps and embeddings equal their definitions."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers.cpu_linear import ReorderedLinear, works
from services.compute.layers.weighted_layers import (
    Embedding,
    Linear,
    Norm,
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(Norm(weight, 1e-5)(x), expected)


def test_linear_maps_rows_with_and_without_bias() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.T + bias)


def test_embedding_looks_up_rows() -> None:
    table = torch.randn(7, 4)
    assert torch.equal(Embedding(table)(torch.tensor([6, 0, 6])), table[[6, 0, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_a_packed_map_is_the_same_map(dtype: torch.dtype, rows: int) -> None:
    if not works(ReorderedLinear, dtype):
        pytest.skip("this processor has no packed kernels for the dtype")
    x, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((rows, 33), (17, 33), (17,)))
    for b in (None, bias):
        torch.testing.assert_close(ReorderedLinear(weight, b)(x), Linear(weight, b)(x))
