"""The search for how many streams go well."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paced_routers import FINENESS, LATE_S, Level, highest


def served(most_that_go_well: int, asked: list[int], num_streams: int) -> Level:
    asked.append(num_streams)
    gap_s = LATE_S if num_streams <= most_that_go_well else 2 * LATE_S
    return Level(num_streams, 50.0 * num_streams, 1.0, gap_s, (0.5,), 0.1)


@given(st.integers(100, 20_000))
def test_what_is_found_goes_well_and_little_more_does_not(most_that_go_well: int) -> None:
    asked: list[int] = []
    level = highest(lambda count: served(most_that_go_well, asked, count), 100, 16_000)
    assert level is not None and level.num_streams <= most_that_go_well
    if most_that_go_well < 8_000:
        assert most_that_go_well - level.num_streams <= most_that_go_well / FINENESS * 2 + 1
    assert len(asked) < 16 and max(asked) <= 16_000


def test_where_the_first_number_is_too_much_fewer_are_tried() -> None:
    assert highest(lambda count: served(40, [], count), 100, 1_000) is not None
    assert highest(lambda count: served(0, [], count), 100, 1_000) is None
