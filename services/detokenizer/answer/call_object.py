"""JSON as models write it; most formats write a call as `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from services.detokenizer.answer.parser import PartSink
from services.detokenizer.answer.reader import Reading, TextReader, ignore

Emit: TypeAlias = Callable[[str], None]

_IN_STRING = re.compile(r'[^"\\]+')
_IN_CONTAINER = re.compile(r'[^"{}\[\]<]+')
_IN_SCALAR = re.compile(r"[^\s,:\"{}\[\]<]+")


def read_string(reader: TextReader, emit: Emit) -> Reading[bool]:
    """Read a string from its first quote to its last, raw; false if the text ends inside."""
    emit(reader.one())
    while True:
        character = yield from reader.run(_IN_STRING, emit)
        if not character:
            return False
        emit(reader.one())
        if character == '"':
            return True
        if not (yield from reader.peek()):
            return False
        emit(reader.one())  # whatever is escaped


def read_value(reader: TextReader, emit: Emit, ends: tuple[str, ...]) -> Reading[bool]:
    """Read a value, raw, as each piece of it comes; false if it is not whole.

    Brackets are counted, not compared, and what stands between them is not looked at: a value that
    is not quite JSON is the client's to judge. Outside of its strings it ends at the latest where
    one of the words in `ends` begins, which begin with `<`.
    """
    character = yield from reader.peek()
    if character == '"':
        return (yield from read_string(reader, emit))
    if character not in ("{", "["):
        return (yield from _read_scalar(reader, emit))
    depth = 0
    while True:
        character = yield from reader.run(_IN_CONTAINER, emit)
        if character == '"':
            if not (yield from read_string(reader, emit)):
                return False
            continue
        if not character or (character == "<" and (yield from reader.sees(*ends))):
            return False
        emit(reader.one())
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return True


def _read_scalar(reader: TextReader, emit: Emit) -> Reading[bool]:
    pieces: list[str] = []

    def take(text: str) -> None:
        pieces.append(text)
        emit(text)

    yield from reader.run(_IN_SCALAR, take)
    return bool(pieces)


def text_of(raw: str) -> str:
    """Return the text of a raw string, fit for any encoding; empty if it is no string."""
    try:
        text = json.loads(raw, strict=False)
    except ValueError:
        return ""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""


ARGUMENTS_KEYS = ("arguments", "parameters")
FIRST_KEYS = ("name", "type", "id", *ARGUMENTS_KEYS)

_FRAME = re.compile(r'\s*,?\s*(?:"(\w*)(?:"\s*:?\s*)?)?')


class CallObject:
    """Reads one call from its object, of which the first brace is the next character.

    The arguments are handed on raw, as they come; fields other than name and arguments are left
    out. A `cautious` reading is for objects with no marker before them: it takes for a call only
    what has a name and an object of arguments, and says so only when both are seen.
    """

    __slots__ = ("_begun", "_cautious", "_early", "_ends", "_has_arguments", "_name", "_out", "_in")

    def __init__(
        self, reader: TextReader, out: PartSink, ends: tuple[str, ...] = (), cautious: bool = False
    ) -> None:
        self._in = reader
        self._out = out
        self._ends = ends
        self._cautious = cautious
        self._name = ""
        self._begun = False
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the name

    def read(self) -> Reading[bool]:
        """Read the object; false if it is no call: then nothing was handed on.

        The caller has made the reader keep what it reads, and in that case uses what was kept. The
        arguments of a broken call are passed on as they are.
        """
        reader = self._in
        reader.one()
        while True:
            character = yield from reader.skip_space()
            if character == "}":
                reader.one()
                return self._close()
            if not (yield from self._field()):
                return self._break()
            character = yield from reader.skip_space()
            if character == ",":
                reader.one()
            elif character != "}":
                return self._break()

    def _field(self) -> Reading[bool]:
        """Read a key and its value; false if that is not what comes."""
        key = yield from self._string()
        if not key or (self._cautious and key not in FIRST_KEYS):
            return False
        if (yield from self._in.skip_space()) != ":":
            return False
        self._in.one()
        character = yield from self._in.skip_space()
        if key == "name" and not self._name:
            return (yield from self._take_name())
        if key in ARGUMENTS_KEYS and not self._has_arguments:
            return (yield from self._take_arguments(character))
        return (yield from read_value(self._in, ignore, self._ends))

    def _string(self) -> Reading[str]:
        pieces: list[str] = []
        if (yield from self._in.peek()) != '"':
            return ""
        whole = yield from read_string(self._in, pieces.append)
        return text_of("".join(pieces)) if whole else ""

    def _take_name(self) -> Reading[bool]:
        self._name = yield from self._string()
        if not self._name:
            return False
        if self._has_arguments or not self._cautious:
            self._begin()
        return True

    def _take_arguments(self, character: str) -> Reading[bool]:
        if self._cautious and character not in ("{", "n"):
            return False
        if self._name and not self._begun:
            self._begin()
        if self._begun:
            self._in.drop()
        emit = self._out.arguments if self._begun else self._early.append
        if character == "n":  # null is how some models write that there are none
            pieces: list[str] = []
            whole = yield from read_value(self._in, pieces.append, self._ends)
            text = "".join(pieces)
            emit("{}" if "null".startswith(text) else text)
        else:
            whole = yield from read_value(self._in, emit, self._ends)
        self._has_arguments = True
        if self._begun:
            self._in.keep()
        return whole

    def _begin(self) -> None:
        self._begun = True
        self._out.call(self._name)
        self._in.keep()
        if self._early:
            self._out.arguments("".join(self._early))

    def _close(self) -> bool:
        if not self._begun:
            return False
        if not self._has_arguments:
            self._out.arguments("{}")
        self._in.drop()
        return True

    def _break(self) -> bool:
        if not self._begun:
            return False
        left = self._in.drop()
        if self._has_arguments:
            self._out.content(left)
        elif not _is_frame(left):
            self._out.arguments(left)
        return True


def _is_frame(text: str) -> bool:
    """Whether a text is what stands between the name of a call and its arguments, or begins it.

    An answer may be cut there; clients who read arguments as they come take such text amiss.
    """
    found = _FRAME.fullmatch(text)
    return found is not None and any(key.startswith(found[1] or "") for key in FIRST_KEYS)
