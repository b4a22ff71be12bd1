"""Attention over latents against float64, with pages full of NaN wherever a row must not look."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.mla.latent_tiling import head_tiles
from tests.kernels.latent_steps import MAX_ROWS, SHAPES, Shape, Step


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("min_chunk", [16, 256])
def test_decode_rows_whole_and_cut(shape: Shape, min_chunk: int, device: torch.device) -> None:
    rows = [(start, 1) for start in (0, 6, 7, 8, 40, 190)]
    step = Step(shape, [*rows, (20, 3)], len(rows), device)
    step.check(step.decode(min_chunk, extra_items=16), range(len(rows)))


def test_as_many_rows_as_there_may_be_of_which_the_last_is_cut(device: torch.device) -> None:
    rows = [(3 * start, 1) for start in range(MAX_ROWS - 1)] + [(150, 1)]
    step = Step(Shape(), rows, len(rows), device)
    step.check(step.decode(16, extra_items=16), range(len(rows)))


@pytest.mark.parametrize(("heads", "tiles"), [(16, 1), (64, 1), (65, 5), (96, 2), (128, 2)])
def test_tiles_of_heads_are_of_one_size(heads: int, tiles: int) -> None:
    assert head_tiles(heads) == tiles
