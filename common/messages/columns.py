"""Checks that messages share: what came over the wire must not contradict itself."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import MalformedMessage

MAX_COUNTER = 1 << 62
"""Attempt counters stay below, so that adding a choice's number cannot overflow 64 bits."""

MAX_CHOICES = 1024
"""More choices than any router lets a request have; whoever loops over them is safe."""

MAX_INDEX = (1 << 31) - 1


def require(condition: bool, what: str) -> None:
    """Raise `MalformedMessage` saying `what` is wrong unless the condition holds."""
    if not condition:
        raise MalformedMessage(f"inconsistent: {what}")


def require_choices(num_choices: int, first_choice: int = 0) -> None:
    """Raise `MalformedMessage` unless the number of choices is one to loop over."""
    require(1 <= num_choices <= MAX_CHOICES, "num_choices is out of range")
    require(0 <= first_choice <= MAX_CHOICES, "first_choice is out of range")


def require_columns(message: object, names: Sequence[str], num_rows: int) -> None:
    """Raise `MalformedMessage` unless every named column has an entry per row."""
    for name in names:
        length = len(getattr(message, name))
        if length != num_rows:
            raise MalformedMessage(f"inconsistent: {name} has {length} entries for {num_rows} rows")


def require_attempts(counters: Sequence[int], first_index: Sequence[int], num_tokens: int) -> None:
    """Raise `MalformedMessage` unless counters and indices are in range; none may be empty."""
    require(min(counters) >= 0 and max(counters) < MAX_COUNTER, "counters out of range")
    require(min(first_index) >= 0, "first_index is negative")
    require(max(first_index) + num_tokens <= MAX_INDEX, "first_index out of range")


def require_rows(name: str, marked: Sequence[int], num_rows: int) -> None:
    """Raise `MalformedMessage` unless marked rows exist and none is marked twice."""
    if marked:
        require(
            min(marked) >= 0 and max(marked) < num_rows, f"{name} names a row that is not there"
        )
        require(len(set(marked)) == len(marked), f"{name} names a row twice")
