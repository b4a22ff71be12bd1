"""The frames after a message's head, each of which holds one array column."""

from __future__ import annotations

from typing import Any

from common.errors import MalformedMessage


def wrong(wanted: str, got: Any) -> MalformedMessage:
    """Make the error that says what was expected and what came."""
    return MalformedMessage(f"{wanted} expected, got {type(got).__name__} {got!r:.40}")


class Frames:
    """Array columns being written or read, in the order of their fields.

    The head has the frame's number where the column belongs, so that a newer sender's columns can
    be told from ours. Numbers must grow, hence no frame is read twice.
    """

    __slots__ = ("data", "last", "surplus")

    def __init__(self, data: list[bytes]) -> None:
        self.data = data
        self.last = -1
        self.surplus = False  # whether a newer sender's fields were passed over

    def append(self, column: bytes) -> int:
        self.data.append(column)
        return len(self.data) - 1

    def take(self, index: Any) -> bytes:
        if type(index) is not int or not self.last < index < len(self.data):
            raise MalformedMessage(f"array frame {index!r:.20} of {len(self.data)}")
        self.last = index
        return self.data[index]

    def finish(self) -> None:
        if self.last != len(self.data) - 1 and not self.surplus:
            raise MalformedMessage(f"{len(self.data)} array frames, {self.last + 1} expected")


class Inline(Frames):
    """Array columns as byte strings inside the head, for values packed into one piece."""

    __slots__ = ()

    def append(self, column: bytes) -> Any:
        return column

    def take(self, index: Any) -> bytes:
        if type(index) is not bytes:
            raise wrong("an array's bytes", index)
        return index

    def finish(self) -> None:
        pass
