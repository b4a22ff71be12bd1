"""A step in plain torch: what it does otherwise than its parts say, with the same result."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers.eager_step import normalised
from services.compute.layers.weighted_layers import Norm


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_weight", [True, False])
def test_a_norm_of_one_token_is_that_of_many(
    rows: int, kind: str, dtype: torch.dtype, wide_weight: bool
) -> None:
    weight = torch.randn(96, dtype=torch.float32 if wide_weight else dtype)
    norm = Norm(weight, 1e-5, "rms" if kind == "rms" else "layer")
    x = (7 * torch.randn(rows, 96)).to(dtype)
    torch.testing.assert_close(normalised(norm, x), norm(x), rtol=2**-7, atol=0)
    assert normalised(norm, x).dtype == dtype


def test_a_norm_of_zeros_is_zeros() -> None:
    norm, x = Norm(torch.ones(32), 1e-5), torch.zeros(1, 32)
    assert torch.equal(normalised(norm, x), x)
