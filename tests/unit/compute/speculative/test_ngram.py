from __future__ import annotations

import pytest

from services.compute.speculative.ngram import draft
from services.compute.speculative.settings import SpeculativeSettings
from services.compute.step import int32_array

FOUR = SpeculativeSettings(num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7, 8, 1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 4]),
        ([7, 8, 1, 9, 8, 2, 7, 8], [1, 9, 8, 2]),  # two alike go before one
        ([7, 8, 1, 7, 8, 2, 7, 8], [2, 7, 8]),  # of several the last; no further than the text
        ([5, 5, 5], [5]),
        ([9, 8, 1, 7, 8], []),  # one alike is too few
        ([1], []),
        ([1, 2, 3], []),
    ],
)
def test_drafts_are_what_followed_the_last_tokens_before(
    ids: list[int], expected: list[int]
) -> None:
    assert draft(int32_array(ids), FOUR).tolist() == expected
