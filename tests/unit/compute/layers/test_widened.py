"""Products in bfloat16 by those in float32 are as exact as bfloat16 has them."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers import widened
from services.compute.layers.widened import WidenedLinear, bmm


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("part_bytes", [1, 4 * 40 * 7, 1 << 20])
@pytest.mark.parametrize("has_scales", [True, False])
def test_a_weight_is_multiplied_part_by_part(
    has_scales: bool, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened, "PART_BYTES", part_bytes)
    x, bias = torch.randn(3, 40).bfloat16(), torch.randn(24).bfloat16()
    weight, scales = torch.randn(24, 40).bfloat16(), None
    if has_scales:
        weight, scales = torch.randint(-127, 128, (24, 40), dtype=torch.int8), torch.rand(24)
    exact = x.double() @ weight.double().T
    exact = exact * scales.double() if scales is not None else exact
    found = WidenedLinear(weight, bias, scales)(x)
    torch.testing.assert_close(found, (exact + bias.double()).bfloat16(), rtol=2**-7, atol=1e-3)


def test_batches_are_multiplied_alike_on_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 5, 16).bfloat16(), torch.randn(2, 16, 9).bfloat16()
    monkeypatch.setattr(widened, "has_bf16", lambda: False)
    found = bmm(x, y)
    torch.testing.assert_close(found, (x.double() @ y.double()).bfloat16(), rtol=2**-7, atol=1e-3)
