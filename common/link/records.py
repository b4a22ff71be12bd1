"""The wire form of a record: the fields of a dataclass in a list, its columns one after the other.

The functions for a class are generated as source, as `dataclasses` generates an `__init__`, so that
a list of the usual length is checked in one pass and fills the slots of the object directly. Field
by field reading a `Tokenize` took 37 us; it takes 9.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from array import array
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Union

from common.errors import MalformedMessage

Parts: TypeAlias = "list[bytes | array[Any]] | None"
"""Array columns that are written beside what MessagePack packs; None where they stay inside it."""

Write: TypeAlias = Callable[[Any, Parts], Any]
"""Makes what MessagePack is to pack."""

Read: TypeAlias = Callable[[Any, "Columns"], Any]
"""Makes the value from what MessagePack has unpacked; raises `MalformedMessage`."""

MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1


def wrong(wanted: str, got: Any) -> MalformedMessage:
    return MalformedMessage(f"{wanted} expected, got {type(got).__name__} {got!r:.40}")


class Columns:
    """Array columns being read, in the order of their fields."""

    __slots__ = ("_data", "_end", "surplus")

    def __init__(self, data: bytes) -> None:
        self.surplus = False  # a newer sender's fields were passed over, and maybe their columns
        self._data = data
        self._end = 0

    def take(self, num_bytes: Any) -> bytes:
        """Return the next column, given what stands for it in the head."""
        start = self._end
        left = len(self._data) - start
        if type(num_bytes) is not int or not 0 <= num_bytes <= left:
            raise MalformedMessage(f"a column of {num_bytes!r:.20} bytes where {left} are left")
        self._end = start + num_bytes
        return self._data[start : self._end]

    def finish(self) -> None:
        """Raise `MalformedMessage` for data that no column has."""
        if self._end != len(self._data) and not self.surplus:
            raise MalformedMessage(f"{len(self._data)} bytes of columns, {self._end} expected")


class Inline(Columns):
    """Array columns as byte strings inside the head, for values packed into one piece."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(b"")

    def take(self, num_bytes: Any) -> bytes:
        if type(num_bytes) is not bytes:
            raise wrong("an array's bytes", num_bytes)
        return num_bytes


def record_write(names: list[str], writes: list[Write | None]) -> Write:
    """Return what makes a record's fields of a value; those without a `write` stay as they are."""
    fields = [
        f"value.{name}" if write is None else f"write{place}(value.{name}, parts)"
        for place, (name, write) in enumerate(zip(names, writes, strict=True))
    ]
    source = f"def write_record(value, parts): return ({', '.join(fields)},)"
    known = {f"write{place}": write for place, write in enumerate(writes)}
    write_record: Write = _generated(source, known)
    return write_record


def record_read(cls: type, hints: list[Any], reads: list[Read], start: int) -> Read:
    """Return what reads a record whose fields have these types and begin at place `start`.

    A list of another length, as releases with other fields write, and one with a wrong value are
    read field by field, which tells the place of the fault.
    """
    fields = dataclasses.fields(cls)
    known: dict[str, Any] = {f"read{place}": read for place, read in enumerate(reads)}
    known |= {"cls": cls, "new": object.__new__, "fillable": _fillable(cls)}
    known |= {"by_field": _read_by_field(cls, reads, start), "check": getattr(cls, "check", None)}
    known |= {"names": [field.name for field in fields], "Malformed": MalformedMessage}
    checks, nested = ["type(value) is list", f"len(value) == {start + len(fields)}"], []
    plain = []
    for place, hint in enumerate(hints):
        if check := _check(hint, f"f{place}", known):
            plain.append(f"({check})")
        else:
            nested += [f"        at = {place}", f"        f{place} = {_nested(hint, place)}"]
    items = ", ".join(["_"] * start + [f"f{place}" for place in range(len(fields))])
    lines = [
        "def read_record(value, columns):",
        f"    if not ({' and '.join(checks)}):",
        "        return by_field(value, columns)",
        f"    {items}, = value",
        f"    if not ({' and '.join(plain) or True}):",
        "        return by_field(value, columns)",
        "    try:",
        *(nested or ["        pass"]),
        "    except Malformed as error:",
        "        raise Malformed(f'{names[at]}: {error}') from None",
        "    record = new(fillable)",
        *(f"    record.{field.name} = f{place}" for place, field in enumerate(fields)),
        "    record.__class__ = cls",
        "    check(record)" if known["check"] else "",
        "    return record",
    ]
    read_record: Read = _generated("\n".join(lines), known)
    return read_record


def _check(hint: Any, name: str, known: dict[str, Any]) -> str:
    """Return the condition under which a value can stay as it is; none for what is to be read."""
    if hint is int:
        return f"type({name}) is int and {MIN_INT} <= {name} <= {MAX_INT}"
    if hint is float:
        return f"type({name}) is float and {name} == {name}"
    if hint in (str, bytes, bool):
        return f"type({name}) is {hint.__name__}"
    if hint is type(None):
        return f"{name} is None"
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is Literal and all(type(word) is str for word in arguments):
        known[f"words_{name}"] = frozenset(arguments)
        return f"type({name}) is str and {name} in words_{name}"
    if origin in (Union, types.UnionType):
        checks = [_check(argument, name, known) for argument in arguments]
        return " or ".join(f"({check})" for check in checks) if all(checks) else ""
    return ""


def _nested(hint: Any, place: int) -> str:
    """Return the expression that reads a value, without a call where nothing is in it."""
    name = f"f{place}"
    read = f"read{place}({name}, columns)"
    arguments, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin in (Union, types.UnionType) and type(None) in arguments:
        return f"None if {name} is None else {read}"
    if origin is list:
        return f"{name} if {name} == [] else {read}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"() if {name} == [] else {read}"
    return read


def _fillable(cls: type) -> type:
    """Return a class of the same slots whose objects are not frozen until they change to `cls`.

    An `__init__` sets 16 fields of a frozen object in 1.5 us, by `object.__setattr__`; so it takes
    0.3.
    """
    slots = {"__slots__": cls.__dict__["__slots__"]} if "__slots__" in cls.__dict__ else {}
    return type(cls.__name__, cls.__bases__, slots)


def _generated(source: str, known: dict[str, Any]) -> Any:
    """Return the one function of a source text, given the names that it uses."""
    functions: dict[str, Any] = {}
    exec(source, known, functions)
    (function,) = functions.values()
    return function


def _read_by_field(cls: type, reads: list[Read], start: int) -> Read:
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    missing = dataclasses.MISSING
    num_required = sum(f.default is missing and f.default_factory is missing for f in fields)
    check: Callable[[Any], None] | None = getattr(cls, "check", None)

    def read_record(value: Any, columns: Columns) -> Any:
        if type(value) is not list:
            raise wrong(f"the fields of {cls.__name__}", value)
        num_fields = len(value) - start
        if num_fields < num_required:
            raise MalformedMessage(f"{cls.__name__} without {names[max(num_fields, 0)]}")
        if num_fields > len(names):
            columns.surplus = True
        items: list[Any] = []
        try:
            for read, item in zip(reads, value[start:] if start else value, strict=False):
                items.append(read(item, columns))
        except MalformedMessage as error:
            raise MalformedMessage(f"{names[len(items)]}: {error}") from None
        record = cls(*items)
        if check is not None:
            check(record)
        return record

    return read_record
