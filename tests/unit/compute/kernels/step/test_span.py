"""Where a query begins to see, of every kind of span."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.kernels.step.span import FULL, AttentionSpan

POSITIONS = range(9)


@pytest.mark.parametrize(
    ("span", "first", "size"),
    [
        (FULL, [0] * 9, FULL.size),
        (AttentionSpan.window(0), [0] * 9, FULL.size),
        (AttentionSpan.window(1), list(POSITIONS), 1),
        (AttentionSpan.window(4), [0, 0, 0, 0, 1, 2, 3, 4, 5], 4),
        (AttentionSpan.chunk(1), list(POSITIONS), 1),
        (AttentionSpan.chunk(4), [0, 0, 0, 0, 4, 4, 4, 4, 8], 4),
        (AttentionSpan(4, 2), [0, 0, 0, 0, 2, 2, 2, 2, 6], 6),
    ],
    ids=str,
)
def test_a_query_sees_from_the_same_position_on_in_numbers_arrays_and_tensors(
    span: AttentionSpan, first: list[int], size: int
) -> None:
    assert [span.first_position(position) for position in POSITIONS] == first
    assert span.first_position(np.arange(9)).tolist() == first
    assert span.first_position(torch.arange(9)).tolist() == first
    assert span.size == size
    assert span.is_full is (size == FULL.size)
