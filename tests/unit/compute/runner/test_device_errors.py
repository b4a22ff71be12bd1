"""Placing newcomers: at once if that goes well, and if not, those at fault alone are named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.messages.sampling import SamplingParams
from services.compute.runner.device_errors import place_all
from services.compute.runner.protocol import SlotErrors
from services.compute.step import SlotDelta

DELTAS = [SlotDelta(slot, 1, SamplingParams(8, seed=slot), 0, ()) for slot in range(4)]


class Room:
    """Takes so many newcomers at once, and some never."""

    def __init__(self, most: int = 9, never: dict[int, Exception] | None = None) -> None:
        self.most = most
        self.never = never or {}
        self.slots: list[int] = []

    def place(self, deltas: Sequence[SlotDelta]) -> list[int]:
        for delta in deltas:
            if delta.slot in self.never:
                raise self.never[delta.slot]
        if len(deltas) > self.most:
            raise MemoryError
        slots = [delta.slot for delta in deltas]
        self.slots += slots
        return slots


def test_all_are_placed_at_once() -> None:
    assert place_all(Room().place, DELTAS) == [[0, 1, 2, 3]]


def test_those_that_cannot_be_placed_are_named_and_no_others() -> None:
    room = Room(never={1: ValueError("too many"), 3: MemoryError()})
    with pytest.raises(
        SlotErrors, match="slot 1: ValueError.'too many'.; slot 3: MemoryError"
    ) as e:
        place_all(room.place, DELTAS)
    assert list(e.value.by_slot) == [1, 3]
    assert isinstance(e.value.__cause__, ValueError)


def test_what_fails_only_together_is_placed_one_by_one() -> None:
    assert place_all(Room(most=2).place, DELTAS) == [[0], [1], [2], [3]]
