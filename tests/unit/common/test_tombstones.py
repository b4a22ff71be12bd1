from __future__ import annotations

from common.messages.address import AttemptId
from common.tombstones import MAX_TOMBSTONES, TOMBSTONE_S, Tombstones


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    tombstones = Tombstones()
    for counter in (0, 1, 0, *range(2, MAX_TOMBSTONES + 1)):
        tombstones.bury(AttemptId("r", counter), 0.0)
    buried = [tombstones.is_buried(AttemptId("r", counter), 0.0) for counter in (0, 1, 2)]
    assert len(tombstones) == MAX_TOMBSTONES and buried == [True, False, True]


def test_a_tombstone_is_forgotten_after_a_minute() -> None:
    tombstones, attempt = Tombstones(), AttemptId("r", 1)
    tombstones.bury(attempt, 5.0)
    assert tombstones.is_buried(attempt, 4.9 + TOMBSTONE_S)
    assert not tombstones.is_buried(attempt, 5.0 + TOMBSTONE_S) and not len(tombstones)
