"""Number columns that travel as little-endian frames of their own, not as MessagePack lists."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, TypeAlias

Int32s: TypeAlias = Annotated["array[int]", "i"]
Int64s: TypeAlias = Annotated["array[int]", "q"]
Float32s: TypeAlias = Annotated["array[float]", "f"]
Float64s: TypeAlias = Annotated["array[float]", "d"]
PackedInt32s: TypeAlias = Annotated[bytes, "i"]
"""A column that stays the frame's bytes, for who makes an array of another kind of it. A copy of
100,000 ids takes 10 us, or 400 where the allocator has to get the memory."""


def int32s(values: Iterable[int] = ()) -> array[int]:
    """Pack integers into a 32-bit column; OverflowError when one does not fit."""
    return array("i", values)


def int64s(values: Iterable[int] = ()) -> array[int]:
    """Pack integers into a 64-bit column; OverflowError when one does not fit."""
    return array("q", values)


def float32s(values: Iterable[float] = ()) -> array[float]:
    """Pack floats into a 32-bit column."""
    return array("f", values)


def float64s(values: Iterable[float] = ()) -> array[float]:
    """Pack floats into a 64-bit column."""
    return array("d", values)
