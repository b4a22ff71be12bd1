from __future__ import annotations

from common.messages.control import DraftReport
from services.compute.speculative.draft_counts import DraftCounts
from services.compute.step import int32_array


def test_drafts_are_counted_by_place_and_by_what_they_are_from() -> None:
    counts = DraftCounts(3)
    counts.add(int32_array((0, 1, 0, 1)), int32_array((2, 3, 0, 3)), int32_array((1, 3, 0, 0)))
    counts.add(int32_array((0,)), int32_array((3,)), int32_array((2,)))
    assert counts.reports() == (
        DraftReport("ngram", 2, 5, (2, 1, 0)),
        DraftReport("prediction", 2, 6, (1, 1, 1)),
    )
    assert (counts.num_offered, counts.num_right) == (11, 6)


def test_what_had_no_drafts_is_not_reported() -> None:
    counts = DraftCounts(2)
    counts.add(int32_array((1,)), int32_array((1,)), int32_array((1,)))
    assert counts.reports() == (DraftReport("prediction", 1, 1, (1, 0)),)
