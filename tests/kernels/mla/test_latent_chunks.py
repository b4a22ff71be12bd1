"""Chunks over latents against float64, beside rows that decode and as if all rows were chunks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.latent_steps import SHAPES, Shape, Step


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_beside_decode_rows(shape: Shape, device: torch.device) -> None:
    step = Step(shape, [(11, 1), (0, 19), (30, 5), (0, 1), (64, 11)], 1, device)
    step.check(step.chunks(), range(1, 5))


def test_all_rows_as_chunks(device: torch.device) -> None:
    step = Step(Shape(), [(11, 1), (70, 1), (0, 3)], 2, device)
    step.check(step.chunks(all_rows=True), range(3))
