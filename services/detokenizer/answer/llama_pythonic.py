"""Llama 3.2 and 4: `[f(a=1, b="x"), g()]`, a Python list of calls, whose literals become JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.parser import PartSink
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


_PLAIN = re.compile(r"[^,()\[\]{}'\"]+")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_TOKEN = re.compile(
    r"""
    (?P<string>(?P<prefix>[rR]?)(?P<quote>'{3}|"{3}|'|")(?:[^\\]|\\.)*?(?P=quote))
    | -?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?
    | True | False | None | true | false | null
    | [\[\](){},:]
    | \s+
    """,
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_ESCAPE = re.compile(
    r"\\(?:(?:x(?=[0-9a-fA-F]{2})|u(?=[0-9a-fA-F]{4})|U(?=[0-9a-fA-F]{8}))"
    r"(?P<code>(?<=x)..|(?<=u)....|(?<=U).{8})|.)",
    re.DOTALL,
)
_SIMPLE_ESCAPES = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
}


def read_expression(reader: TextReader, emit: Callable[[str], None]) -> Reading[str]:
    """Read an argument of a call up to the `,` or `)` behind it, and return that unread.

    Returns another character, or none, if the argument does not end so. Brackets are counted.
    """
    depth = 0
    while True:
        character = yield from reader.run(_PLAIN, emit)
        if not character:
            return ""
        if character in "'\"":
            if not (yield from _read_string(reader, emit, character)):
                return ""
            continue
        if not depth and character in ",)]}":
            return character
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        emit(reader.one())


def _read_string(reader: TextReader, emit: Callable[[str], None], quote: str) -> Reading[bool]:
    """Read a string, of one quote or three; false if the text ends inside."""
    end = yield from reader.match(3 * quote)
    if not end:
        end = reader.one()
    emit(end)
    while True:
        character = yield from reader.run(_IN_STRING[quote], emit)
        if not character:
            return False
        if character == "\\":
            emit(reader.one())
            if not (yield from reader.peek()):
                return False
            emit(reader.one())
            continue
        if (yield from reader.match(end)):
            emit(end)
            return True
        emit(reader.one())


def json_of(expression: str) -> str:
    """Return the JSON text of a literal; what is no literal becomes a string of what it says.

    JSON is taken as that, since models write it here, too. Any other literal is rewritten token by
    token and then read as JSON. (`ast.literal_eval` would read more, but its parser can be made to
    exhaust the stack.)
    """
    for rewrite in (str.strip, _rewritten):
        try:
            return _dumps(json.loads(rewrite(expression)))
        except (ValueError, RecursionError):
            continue
    return _dumps(expression.strip())


def _rewritten(expression: str) -> str:
    """Write a literal's tokens as JSON has them; ValueError if it has others."""
    out: list[str] = []
    at = 0
    while at < len(expression):
        token = _TOKEN.match(expression, at)
        if token is None:
            raise ValueError(f"no literal has {expression[at]!r}")
        at = token.end()
        text = token[0]
        if token["string"] is not None:
            body = text[len(token["prefix"]) + len(token["quote"]) : -len(token["quote"])]
            out.append(json.dumps(body if token["prefix"] else _ESCAPE.sub(_unescaped, body)))
        elif text in "]})" and out and out[-1] == ",":
            out[-1] = _WORDS.get(text, text)  # JSON has no comma after the last item
        elif not text.isspace():
            out.append(_WORDS.get(text, text))
    return "".join(out)


def _unescaped(escape: re.Match[str]) -> str:
    text = escape[0]
    simple = _SIMPLE_ESCAPES.get(text[1])
    if simple is not None:
        return simple
    if escape["code"] is not None:
        code = int(escape["code"], 16)
        return chr(code) if code <= sys.maxunicode else text
    return text  # what Python does not know, it leaves as it is


def _dumps(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if text.isascii() or text.encode("utf-8", "replace").decode() == text:
        return text
    return json.dumps(value, allow_nan=False)  # half of a surrogate pair stays an escape
