"""Scaled and capped logits: against float64, in place, and to the ends of float32."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.sampling.scale_logits import scale_logits, scale_logits_reference

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize(("scale", "softcap"), [(0.0625, 0.0), (1.0, 30.0), (1 / 3, 30.0)])
@pytest.mark.parametrize(("samples", "width"), [(1, 1), (3, 4097), (2, 9000)])
def test_logits_are_scaled_then_capped_where_they_lie(
    samples: int, width: int, scale: float, softcap: float, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(samples + 1, width, generator=generator) * 40
    expected = logits.double()
    scale_logits_reference(expected[:samples], scale, softcap)
    found = logits.to(device, copy=True)
    scale_logits(found[:samples], scale, softcap)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(found[samples:].cpu(), logits[samples:])


def test_infinite_logits_meet_the_cap_and_nan_stays(device: torch.device) -> None:
    logits = torch.tensor([[torch.inf, -torch.inf, 1e30, -1e30, 0.0, torch.nan]], device=device)
    scale_logits(logits, softcap=30.0)
    assert logits[0, :5].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0]
    assert bool(logits[0, 5].isnan())
