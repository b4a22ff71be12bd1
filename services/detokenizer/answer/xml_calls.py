"""Calls whose parameters stand between tags, the values as they are: Qwen3-Coder, GLM, MiniMax.

The arguments come out as one JSON object, which is written as the parameters come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from common.chat_formats import ParameterMarkers, ToolMarkers
from common.parameter_kinds import (
    ANY,
    ARRAY,
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    PYTHON_WORDS,
    QUOTED,
    STRINGS,
    TEXT,
    Kinds,
    kind_of,
)
from services.detokenizer.answer.call_object import read_value
from services.detokenizer.answer.parser import PartSink
from services.detokenizer.answer.reader import SPACE, Reading, TextReader

_UP_TO_TAG = re.compile(r"[^<]+")
_UP_TO_TAG_OR_LINE = re.compile(r"[^<\n]+")
_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r'[^<>"\n]+')
_SCALAR = re.compile(r"[\w.+-]+")
_JSON_SPACE = " \t\r\n"
_FIRST = {
    NULL: "nN",
    BOOLEAN: "tfTF",
    INTEGER: "-0123456789",
    NUMBER: "-0123456789",
    ARRAY: "[",
    OBJECT: "{",
    QUOTED: '"',
}


class XmlCallParser:
    """Finds calls by the markers of their format; `kinds` are those of the functions' parameters.

    A call may lack the tag around it, or its own last tag. A value ends at the first tag that ends
    values, except that strings inside of JSON are read to their quotes.
    """

    def __init__(self, markers: ToolMarkers, kinds: Kinds) -> None:
        assert markers.parameters is not None
        self._markers = markers
        self._tags = markers.parameters
        self._kinds = kinds

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        markers = self._markers
        begins = tuple(filter(None, (markers.begin, markers.call_begin)))
        is_open = False  # a call was there, and the last tag is still to come
        while (yield from reader.run(_UP_TO_TAG, out.content)):
            word = yield from reader.match(*begins, markers.end)
            if word in begins:
                reader.keep(word)
                if (yield from self._calls(reader, out, word == markers.begin)):
                    is_open = True
                out.content(reader.drop())
            elif word and is_open:
                is_open = False
            else:
                out.content(word or reader.one())

    def _calls(self, reader: TextReader, out: PartSink, is_outer: bool) -> Reading[bool]:
        """Read calls behind a first tag, the outer one or that of a call; false if none."""
        begin, num_calls = self._markers.call_begin, 0
        while True:
            if begin and (is_outer or num_calls):
                yield from reader.skip_space()
                if not (yield from reader.match(begin)):
                    break
            if not (yield from self._call(reader, out)):
                break
            num_calls += 1
            if not begin:
                break
            reader.keep()
        return num_calls > 0

    def _call(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        """Read a call from its name to its last tag; false, and all is kept, if it is none."""
        pieces: list[str] = []
        if not self._tags.name_end:
            yield from reader.skip_space()
        yield from reader.run(_NAME, pieces.append)
        if self._tags.name_end:
            is_name = yield from reader.match(self._tags.name_end)
        else:
            yield from reader.skip_space()
            is_name = yield from reader.sees(self._tags.key_begin, self._markers.end)
        if not pieces or not is_name:
            return False
        reader.drop()
        name = "".join(pieces)
        out.call(name)
        yield from _Parameters(self._markers, self._tags, reader, out).read(
            self._kinds.get(name, {})
        )
        return True


class _Parameters:
    """Reads the parameters of one call, up to the tag behind them."""

    __slots__ = ("_ends", "_in", "_markers", "_num", "_out", "_tags", "_text")

    def __init__(
        self, markers: ToolMarkers, tags: ParameterMarkers, reader: TextReader, out: PartSink
    ) -> None:
        self._markers = markers
        self._tags = tags
        self._in = reader
        self._out = out
        self._num = 0
        end = tags.value_end
        self._ends = (f"\n{end}", end) if tags.on_lines else (end,)
        self._text = _UP_TO_TAG_OR_LINE if tags.on_lines else _UP_TO_TAG

    def read(self, kinds: Mapping[str, str]) -> Reading[None]:
        """Read all parameters, and close the object unless the text is over before."""
        reader, tags = self._in, self._tags
        ends = tuple(filter(None, (self._markers.call_end,)))
        while True:
            reader.keep()
            yield from reader.skip_space()
            word = yield from reader.match(tags.key_begin, *ends)
            if word != tags.key_begin:
                break
            if not (key := (yield from self._key())):
                break
            reader.drop()
            self._out.arguments(f"{self._before}{_quoted(key)}: ")
            self._num += 1
            if not (yield from self._value(kinds.get(key, ANY))):
                return
        if word not in ends and reader.ended:
            reader.drop()
            reader.rest()  # a tag of which only the beginning came
            return
        self._out.arguments("}" if self._num else "{}")
        left = reader.drop()
        if word not in ends:
            self._out.content(left)

    @property
    def _before(self) -> str:
        return ", " if self._num else "{"

    def _key(self) -> Reading[str]:
        """Read a key and what stands before its value; nothing if that is not what comes."""
        reader, tags = self._in, self._tags
        pieces: list[str] = []
        yield from reader.run(_KEY, pieces.append)
        key = "".join(pieces).strip()
        word = yield from reader.match(tags.key_end)
        if word and tags.value_begin:
            yield from reader.skip_space()
            word = yield from reader.match(tags.value_begin)
        if word:
            return key
        if key and reader.ended:
            self._out.arguments(f"{self._before}{_quoted(key)[:-1]}")
        return ""

    def _value(self, kinds: str) -> Reading[bool]:
        """Read a value and its last tag; false if the text is over before."""
        reader, out = self._in, self._out
        if self._tags.on_lines:
            yield from reader.match("\n")
        if kinds == TEXT:
            out.arguments('"')
            return (yield from self._rest_of_text())
        pieces: list[str] = []
        character = yield from reader.run(SPACE, pieces.append)
        may_be_text = bool(STRINGS.intersection(kinds))
        if not may_be_text and character in ("{", "["):
            return (yield from self._container())
        firsts = "".join(_FIRST.get(kind, "") for kind in kinds)
        if character and (character in firsts or not may_be_text):
            if character in '{["':
                yield from read_value(reader, pieces.append, (self._tags.value_end,))
            else:
                yield from reader.run(_SCALAR, pieces.append)
            character = yield from reader.run(SPACE, pieces.append)
        text = "".join(pieces)
        if character and (yield from reader.match(self._tags.value_end)):
            if self._tags.on_lines:
                text = text.removesuffix("\n")
            out.arguments(_literal(text, kinds))
            return True
        if not character and not may_be_text:
            out.arguments(text)
            return False
        out.arguments(f'"{_escaped(text)}')
        return (yield from self._rest_of_text())

    def _rest_of_text(self) -> Reading[bool]:
        """Hand on the text up to the tag behind it as that of a JSON string."""
        reader = self._in

        def emit(text: str) -> None:
            self._out.arguments(_escaped(text))

        while (yield from reader.run(self._text, emit)):
            if (yield from reader.match(*self._ends)):
                self._out.arguments('"')
                return True
            emit(reader.one())
        return False

    def _container(self) -> Reading[bool]:
        """Hand on a list or an object as it is, and whatever stands behind it."""
        reader, out, end = self._in, self._out, self._tags.value_end
        yield from read_value(reader, out.arguments, (end,))
        space: list[str] = []
        while (yield from reader.run(SPACE, space.append)):
            if (yield from reader.match(end)):
                return True
            out.arguments("".join(space) + reader.one())
            space.clear()
        return False


def _literal(text: str, kinds: str) -> str:
    """Return a whole value as JSON: of one of its kinds if it can be, otherwise a string."""
    stripped = text.strip(_JSON_SPACE)
    written = PYTHON_WORDS.get(stripped, stripped)
    try:
        kind = kind_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return _quoted(text)
    return written if kind in kinds or not STRINGS.intersection(kinds) else _quoted(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
