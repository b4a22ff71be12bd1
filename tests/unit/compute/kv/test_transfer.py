"""Page pairs join into runs where both memories allow it."""

from __future__ import annotations

import pytest

from services.compute.kv.transfer import PagePairs
from services.compute.step import int32_array


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([(4, 9)], [(4, 9, 1)]),
        ([(4, 9), (5, 10), (6, 11)], [(4, 9, 3)]),
        ([(4, 9), (5, 11), (6, 12)], [(4, 9, 1), (5, 11, 2)]),
        ([(4, 9), (6, 10)], [(4, 9, 1), (6, 10, 1)]),
        ([(5, 9), (4, 8), (3, 7)], [(5, 9, 1), (4, 8, 1), (3, 7, 1)]),
    ],
)
def test_pairs_that_follow_one_another_in_both_memories_are_one_run(
    pairs: list[tuple[int, int]], runs: list[tuple[int, int, int]]
) -> None:
    pages = PagePairs(*(int32_array([pair[side] for pair in pairs]) for side in (0, 1)))
    assert [*zip(*(column.tolist() for column in pages.runs()), strict=True)] == runs
