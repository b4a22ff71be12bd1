"""Turns the type hints of the message dataclasses into functions that write and read the wire.

Every function here is made once, when a codec is. Writing trusts the sender (its types are checked
by mypy); reading trusts nothing and raises `MalformedMessage` with the path of the fault.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from common.errors import MalformedMessage
from common.link.records import (
    MAX_INT,
    MIN_INT,
    Columns,
    Inline,
    Parts,
    Read,
    Write,
    record_read,
    record_write,
    wrong,
)
from common.messages.previous import OldForm

_SWAP = sys.byteorder == "big"
_SCALARS = (int, float, str, bytes, bool)


class Shapes:
    """Makes and remembers the writers and readers of types; those of `old_forms` are translated."""

    def __init__(self, old_forms: Mapping[type, OldForm]) -> None:
        self._old_forms = old_forms
        self._records: dict[tuple[type, int], tuple[Write, Read]] = {}

    def shape(self, hint: Any) -> tuple[Write | None, Read]:
        """Return (write, read) of a type; a write of None means "as it is"."""
        if hint in _SCALARS:
            return None, _SCALAR_READS[hint]
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is typing.Annotated:
            kind, code = arguments
            return _column(code, packed=kind is bytes)
        if origin is Literal:
            return None, _choice(arguments)
        if origin is tuple and arguments[-1] is not Ellipsis:
            return self._fixed(arguments)
        if origin in (tuple, list):
            return self._sequence(arguments[0], origin)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.record(hint, 0)
        raise TypeError(f"no wire form for {hint!r}")

    def record(self, cls: type, start: int) -> tuple[Write, Read]:
        """Return (write, read) of a dataclass whose fields begin at place `start` of its list."""
        key = (cls, start)
        if key not in self._records:
            old = self._old_forms.get(cls)
            shape = self._make_record(cls if old is None else old.form, start)
            self._records[key] = shape if old is None else old.translated(*shape)
        return self._records[key]

    def _make_record(self, cls: type, start: int) -> tuple[Write, Read]:
        # `array[int]` cannot be subscripted before Python 3.12; only its metadata matters here.
        hints = typing.get_type_hints(cls, localns={"array": Sequence}, include_extras=True)
        names = [field.name for field in dataclasses.fields(cls)]
        kinds = [hints[name] for name in names]
        shapes = [self.shape(hint) for hint in kinds]
        return (
            record_write(names, [write for write, _ in shapes]),
            record_read(cls, kinds, [read for _, read in shapes], start),
        )

    def _sequence(self, item: Any, kind: type) -> tuple[Write | None, Read]:
        write, read = self.shape(item)
        if item in (int, str, bytes):
            return None, _scalar_sequence_read(item, kind)
        return write and _sequence_write(write), _sequence_read(read, kind)

    def _fixed(self, arguments: tuple[Any, ...]) -> tuple[Write | None, Read]:
        shapes = [self.shape(argument) for argument in arguments]
        if any(write is not None for write, _ in shapes):
            raise TypeError(f"no wire form for tuple{arguments!r}")
        return None, _fixed_read([read for _, read in shapes])

    def _union(self, arguments: tuple[Any, ...]) -> tuple[Write | None, Read]:
        records = [a for a in arguments if dataclasses.is_dataclass(a)]
        plain = [a for a in arguments if a not in records and a is not type(None)]
        reads: dict[type, Read] = {}
        write: Write | None = None
        if type(None) in arguments:
            reads[type(None)] = lambda value, columns: None
        for argument in plain:
            if argument not in _SCALARS:
                raise TypeError(f"no wire form for {argument!r} in a union")
            reads[argument] = _SCALAR_READS[argument]
        if len(records) == 1:
            write, reads[list] = self.shape(records[0])
        elif records:
            tagged = self.tagged(records, 1)
            write, reads[list] = _tagged_write(tagged), _tagged_read(tagged)
        return write and _optional_write(write), _union_read(reads)

    def tagged(self, records: Sequence[Any], start: int) -> dict[str, tuple[type, Any, Read]]:
        """Return the (class, write, read) of each tag; `start` is the place of the first field."""
        table: dict[str, tuple[type, Any, Read]] = {}
        for cls in records:
            tag = cls.TAG
            if tag in table:
                raise TypeError(f"tag {tag!r} stands for two messages")
            table[tag] = (cls, *self.record(cls, start))
        return table


# --- scalars


def _read_int(value: Any, columns: Columns) -> int:
    if type(value) is not int:
        raise wrong("int", value)
    if not MIN_INT <= value <= MAX_INT:
        raise MalformedMessage(f"int {value} needs more than 64 bits")
    return value


def _read_float(value: Any, columns: Columns) -> float:
    if type(value) is float:
        if value != value:
            raise MalformedMessage("float expected, got NaN")
        return value
    if type(value) is int:
        return float(value)
    raise wrong("float", value)


def _exactly(kind: type) -> Read:
    def read(value: Any, columns: Columns) -> Any:
        if type(value) is not kind:
            raise wrong(kind.__name__, value)
        return value

    return read


_SCALAR_READS: dict[Any, Read] = {
    int: _read_int,
    float: _read_float,
    str: _exactly(str),
    bytes: _exactly(bytes),
    bool: _exactly(bool),
}


def _choice(values: tuple[Any, ...]) -> Read:
    kinds = {type(value) for value in values}
    allowed = frozenset(values)

    def read(value: Any, columns: Columns) -> Any:
        if type(value) not in kinds or value not in allowed:
            raise wrong(f"one of {sorted(allowed)}", value)
        return value

    return read


# --- array columns


def _column(code: str, packed: bool) -> tuple[Write, Read]:
    """Return (write, read) of a column; a packed one is bytes, and is an array nowhere here."""
    item_bytes = array(code).itemsize

    def write(value: Any, parts: Parts) -> Any:
        if packed and type(value) is not bytes:
            raise TypeError(f"packed numbers expected, got {value!r:.40}")
        if not packed and (type(value) is not array or value.typecode != code):
            raise TypeError(f"an array of type {code!r} expected, got {value!r:.40}")
        if _SWAP:
            value = _swapped(code, value if packed else value.tobytes())
        if parts is None:
            return value.tobytes() if type(value) is array else value
        parts.append(value)  # its bytes are copied once, into the frame
        return len(value) if type(value) is bytes else len(value) * item_bytes

    def read(value: Any, columns: Columns) -> Any:
        data = columns.take(value)
        if len(data) % item_bytes:
            raise MalformedMessage(f"{len(data)} bytes are no whole number of {item_bytes}")
        if _SWAP:
            data = _swapped(code, data)
        return data if packed else array(code, data)

    return write, read


def _swapped(code: str, data: bytes) -> bytes:
    column = array(code, data)
    column.byteswap()
    return column.tobytes()


# --- tuples and lists: columns of what is in them stay inside the head

_INLINE = Inline()


def _sequence_write(write: Write) -> Write:
    def write_all(value: Any, parts: Parts) -> Any:
        return [write(item, None) for item in value] if value else value

    return write_all


def _sequence_read(read: Read, kind: type) -> Read:
    def read_all(value: Any, columns: Columns) -> Any:
        if type(value) is not list:
            raise wrong("list", value)
        items: list[Any] = []
        try:
            for item in value:
                items.append(read(item, _INLINE))  # noqa: PERF401 (the length tells the place)
        except MalformedMessage as error:
            raise MalformedMessage(f"[{len(items)}]: {error}") from None
        return items if kind is list else tuple(items)

    return read_all


def _scalar_sequence_read(item: type, kind: type) -> Read:
    only = {item}

    def read_all(value: Any, columns: Columns) -> Any:
        if type(value) is not list:
            raise wrong("list", value)
        if value:
            if set(map(type, value)) != only:
                raise MalformedMessage(f"list of {item.__name__} expected, got another type in it")
            if item is int and (min(value) < MIN_INT or max(value) > MAX_INT):
                raise MalformedMessage("an int in the list needs more than 64 bits")
        return value if kind is list else tuple(value)

    return read_all


def _fixed_read(reads: list[Read]) -> Read:
    def read_all(value: Any, columns: Columns) -> Any:
        if type(value) is not list or len(value) != len(reads):
            raise wrong(f"list of {len(reads)}", value)
        return tuple([read(item, columns) for read, item in zip(reads, value, strict=True)])

    return read_all


# --- unions


def _optional_write(write: Write) -> Write:
    def write_if_record(value: Any, parts: Parts) -> Any:
        if value is None or type(value) in _SCALARS:
            return value
        return write(value, parts)

    return write_if_record


def _union_read(reads: dict[type, Read]) -> Read:
    if float in reads and int not in reads:
        reads[int] = _read_float
    wanted = " or ".join(kind.__name__ for kind in reads)

    def read(value: Any, columns: Columns) -> Any:
        some = reads.get(type(value))
        if some is None:
            raise wrong(wanted, value)
        return some(value, columns)

    return read


def _tagged_write(table: dict[str, tuple[type, Any, Read]]) -> Write:
    by_class = {cls: (tag, write) for tag, (cls, write, _) in table.items()}

    def write_tagged(value: Any, parts: Parts) -> Any:
        tag, write = by_class[type(value)]
        return [tag, *write(value, parts)]

    return write_tagged


def _tagged_read(table: dict[str, tuple[type, Any, Read]]) -> Read:
    def read(value: Any, columns: Columns) -> Any:
        tag = value[0] if value else None
        entry = table.get(tag) if type(tag) is str else None
        if entry is None:
            raise wrong(f"a tag of {sorted(table)}", tag)
        return entry[2](value, columns)

    return read
