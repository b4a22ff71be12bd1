"""DeepSeek: each call between tokens of its own; V3 and R1 have the arguments in a code block."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.call_object import read_value
from services.detokenizer.answer.parts import PartSink
from services.detokenizer.answer.reader import Reading, TextReader

_TEXT = re.compile(r"[^<]+")
_HEAD = re.compile(r"[^<\n]+")
_NAME = re.compile(r"[^<\n{`]+")
_TYPE = "function"
_FENCE = "```"
_LANGUAGE = "json"


class DeepSeekParser:
    """Calls one after the other, all of them inside of one more pair of markers.

    V3.1 writes a call as name, separator, arguments; V3 and R1 as type, separator, name, and the
    arguments in a block of code. What follows the separator tells them apart.
    """

    def __init__(self, markers: ToolMarkers) -> None:
        self._all_begin = markers.begin
        self._all_end = markers.end
        self._begin = markers.call_begin
        self._end = markers.call_end
        self._separator = markers.arguments

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        to_come: set[str] = set()  # the last markers of what has begun
        begins, ends = (self._all_begin, self._begin), (self._end, self._all_end)
        while (yield from reader.run(_TEXT, out.content)):
            word = yield from reader.match(*begins, *ends)
            if word in begins:
                reader.keep(word)
                if word == self._all_begin:
                    yield from reader.skip_space()
                is_call = word == self._begin or (yield from reader.match(self._begin))
                if is_call and (yield from self._call(reader, out)):
                    to_come = {self._end, self._all_end}
                out.content(reader.drop())
            elif word in to_come:
                to_come.discard(word)
            else:
                out.content(word or reader.one())

    def _call(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        """Read a call up to its last marker; false if it is none."""
        pieces: list[str] = []
        yield from reader.run(_HEAD, pieces.append)
        if not (yield from reader.match(self._separator)):
            return False
        character = yield from reader.skip_space()
        bare = character == "{" or bool((yield from reader.sees(self._end)))
        if not bare:
            if "".join(pieces).strip() != _TYPE:
                return False
            pieces.clear()
            character = yield from reader.run(_NAME, pieces.append)
        name = "".join(pieces).strip()
        if not name or (not bare and character not in ("\n", "`", "{")):
            return False
        reader.drop()
        out.call(name)
        yield from self._read_arguments(reader, out)
        return True

    def _read_arguments(self, reader: TextReader, out: PartSink) -> Reading[None]:
        yield from reader.skip_space()
        if (yield from reader.match(_FENCE)):
            yield from reader.match(_LANGUAGE)
            yield from reader.skip_space()
        if (yield from reader.sees(self._end)):
            out.arguments("{}")
        elif (yield from read_value(reader, out.arguments, (self._end,))):
            yield from reader.skip_space()
            yield from reader.match(_FENCE)
