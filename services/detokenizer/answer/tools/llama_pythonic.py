"""Llama 3.2 and 4: `[f(a=1, b="x"), g()]`, a Python list of calls."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.parts import PartSink
from services.detokenizer.answer.python_text import json_of, read_expression
from services.detokenizer.answer.reader import SPACE, Reading, TextReader

_TEXT = re.compile(r"[^\n<]+")
_NAME = re.compile(r"[\w.:/-]+")


class LlamaPythonicParser:
    """Lists at the beginning of the answer or of a line, or between the markers.

    A list is one of calls once its first call has a named argument or none at all. Each argument
    is handed on as JSON as soon as it is complete.
    """

    def __init__(self, markers: ToolMarkers) -> None:
        self._begin = markers.begin
        self._end = markers.end

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        """Read the text to its end and hand on what is in it."""
        line_starts = True
        is_open = False  # the first marker was there, the last is still to come
        while True:
            if line_starts and (yield from reader.run(SPACE, out.content)) == "[":
                reader.keep()
                yield from self._list(reader, out)
            line_starts = False
            character = yield from reader.run(_TEXT, out.content)
            if not character:
                return
            if character == "\n":
                line_starts = True
                continue
            word = yield from reader.match(self._begin, self._end)
            if word == self._begin:
                reader.keep(word)
                if (yield from reader.skip_space()) == "[":
                    is_open = yield from self._list(reader, out)
                else:
                    out.content(reader.drop())
            elif word and is_open:
                is_open = False
            else:
                out.content(word or reader.one())

    def _list(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        """Read a list from its bracket on; false if no calls are in it."""
        num_calls = 0
        while True:
            reader.one()  # the bracket, or a comma
            call = _Call(reader, out)
            whole = yield from call.read()
            num_calls += call.begun
            if not whole:
                break
            reader.keep()
            character = yield from reader.skip_space()
            if character == "]":
                reader.one()
                reader.drop()
                break
            if character != ",":
                break
        out.content(reader.drop())
        return num_calls > 0


class _Call:
    """Reads `name(key=value, …)`."""

    __slots__ = ("_in", "_out", "begun")

    def __init__(self, reader: TextReader, out: PartSink) -> None:
        self._in = reader
        self._out = out
        self.begun = False

    def read(self) -> Reading[bool]:
        """Read the call; false if it does not end well, or never began."""
        reader, out = self._in, self._out
        yield from reader.skip_space()
        name = yield from self._identifier()
        if (yield from reader.skip_space()) != "(" or not name:
            return False
        reader.one()
        num_arguments = 0
        while (yield from reader.skip_space()) != ")":
            key = yield from self._identifier()
            if (yield from reader.skip_space()) != "=" or not key:
                return self._break()
            reader.one()
            before = "{" if not num_arguments else ", "
            if not self.begun:
                self._begin(name)
            if not (yield from self._argument(f"{before}{json_of(repr(key))}: ")):
                return self._break()
            num_arguments += 1
        if not self.begun:
            self._begin(name)
        reader.one()
        out.arguments("}" if num_arguments else "{}")
        return True

    def _identifier(self) -> Reading[str]:
        pieces: list[str] = []
        yield from self._in.run(_NAME, pieces.append)
        name = "".join(pieces)
        return name if any(letter.isalpha() or letter == "_" for letter in name) else ""

    def _begin(self, name: str) -> None:
        self.begun = True
        self._out.call(name)

    def _argument(self, before: str) -> Reading[bool]:
        """Read an argument's value and the comma behind it; `before` stands before the value."""
        reader, out = self._in, self._out
        yield from reader.skip_space()
        reader.drop()
        pieces: list[str] = []
        character = yield from read_expression(reader, pieces.append)
        expression = "".join(pieces)
        reader.keep()
        if character not in (",", ")") or not expression.strip():
            out.arguments(before + expression)  # as it was sent
            return False
        out.arguments(before + json_of(expression))
        if character == ",":
            reader.one()
        return True

    def _break(self) -> bool:
        if self.begun:
            self._out.arguments(self._in.drop())
        return False
