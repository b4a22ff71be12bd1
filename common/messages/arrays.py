"""Columns of numbers, which travel as little-endian bytes, and checks of what comes over the wire.

Counts and places are unsigned, so that none can be negative.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, TypeAlias

from common.errors import MalformedMessage

Uint8s: TypeAlias = Annotated["array[int]", "B"]
Int32s: TypeAlias = Annotated["array[int]", "i"]
Int64s: TypeAlias = Annotated["array[int]", "q"]
Uint32s: TypeAlias = Annotated["array[int]", "I"]
Uint64s: TypeAlias = Annotated["array[int]", "Q"]
Float32s: TypeAlias = Annotated["array[float]", "f"]
Float64s: TypeAlias = Annotated["array[float]", "d"]
PackedInt32s: TypeAlias = Annotated[bytes, "i"]
"""A column that stays bytes, for a receiver that makes another kind of array of it. A copy of
100,000 ids takes 10 us, or 400 where the allocator has to get the memory."""

MAX_COUNTER = 1 << 62
"""Attempt counters stay below, so that adding a choice's number cannot overflow 64 bits."""

MAX_CHOICES = 1024
"""More choices than any router lets a request have: a loop over them is short."""

MAX_INDEX = (1 << 31) - 1


def uint8s(values: Iterable[int] = ()) -> array[int]:
    return array("B", values)


def int32s(values: Iterable[int] = ()) -> array[int]:
    """Pack integers into a 32-bit column; OverflowError when one does not fit."""
    return array("i", values)


def int64s(values: Iterable[int] = ()) -> array[int]:
    return array("q", values)


def uint32s(values: Iterable[int] = ()) -> array[int]:
    return array("I", values)


def uint64s(values: Iterable[int] = ()) -> array[int]:
    return array("Q", values)


def float32s(values: Iterable[float] = ()) -> array[float]:
    return array("f", values)


_ONE = uint32s((1,))


def require(condition: bool, fault: str) -> None:
    """Raise `MalformedMessage` naming the fault unless the condition holds."""
    if not condition:
        raise MalformedMessage(f"inconsistent: {fault}")


def require_choices(num_choices: int, first_choice: int = 0) -> None:
    """Raise `MalformedMessage` unless a loop over the choices is short."""
    require(1 <= num_choices <= MAX_CHOICES, "num_choices is out of range")
    require(0 <= first_choice <= MAX_CHOICES, "first_choice is out of range")


def require_columns(message: object, names: Sequence[str], num_rows: int) -> None:
    """Raise `MalformedMessage` unless every named column has an entry per row."""
    for name in names:
        length = len(getattr(message, name))
        if length != num_rows:
            raise MalformedMessage(f"inconsistent: {name} has {length} entries for {num_rows} rows")


def require_attempts(
    counters: array[int], first_index: array[int], num_tokens: array[int], num_ids: int
) -> None:
    """Raise `MalformedMessage` unless unsigned counters and indices are in range, and the numbers
    of tokens are those of so many ids."""
    require(max(counters, default=0) < MAX_COUNTER, "counters out of range")
    require(max(first_index, default=0) + num_ids <= MAX_INDEX, "first_index out of range")
    if num_tokens != _ONE * num_ids:  # what most messages have, compared in 0.1 us
        require(sum(num_tokens) == num_ids, "token_ids against num_tokens")


def require_rows(name: str, rows: Collection[int], num_rows: int) -> None:
    """Raise `MalformedMessage` unless marked rows exist and none is marked twice."""
    if rows:
        require(min(rows) >= 0 and max(rows) < num_rows, f"{name} names a row that is not there")
        require(len(set(rows)) == len(rows), f"{name} names a row twice")
