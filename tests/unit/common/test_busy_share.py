"""A share follows what it counts within seconds, and a moment's work is no load."""

from __future__ import annotations

import pytest

from common.busy_share import BusyShare


def shares(busy: list[float], step_s: float = 0.5) -> list[float]:
    """What is seen when a counter goes on by these shares of each step."""
    total_s = 0.0
    share = BusyShare(lambda: total_s)
    found = [share.at(0.0)]
    for number, part in enumerate(busy, 1):
        total_s += part * step_s
        found.append(share.at(number * step_s))
    return found


def test_what_is_always_busy_is_seen_to_be_within_seconds() -> None:
    found = shares([1.0] * 40)
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[20] == pytest.approx(0.865, abs=0.01)  # after 10 s
    assert found[-1] <= 1.0


def test_a_moment_of_work_counts_for_little() -> None:
    assert max(shares([0.0, 1.0, 0.0, 0.0])) < 0.1


def test_looks_more_often_than_heartbeats_change_nothing() -> None:
    assert shares([0.5] * 200, 0.1)[-1] == pytest.approx(0.5, abs=0.02)
