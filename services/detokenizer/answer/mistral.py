"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, later `[TOOL_CALLS]f[ARGS]{…}`."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.call_object import CallObject, read_value
from services.detokenizer.answer.parts import PartSink
from services.detokenizer.answer.reader import Reading, TextReader, ignore

_TEXT = re.compile(r"[^\[]+")
_NAME = re.compile(r"[\w.:/-]+")
_ID = re.compile(r"\w+")


class MistralParser:
    """After the marker a list of objects, an object, or a name and its arguments.

    An id that the model gives to a call itself is left out.
    """

    def __init__(self, markers: ToolMarkers) -> None:
        self._begin = markers.begin
        self._arguments = markers.arguments
        self._call_id = markers.call_id
        self._separator = markers.separator

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        while (yield from reader.run(_TEXT, out.content)):
            word = yield from reader.match(self._begin)
            if not word:
                out.content(reader.one())
                continue
            reader.keep(word)
            character = yield from reader.skip_space()
            if character == "[" and not (yield from reader.sees(self._begin)):
                yield from self._list(reader, out)
            elif character == "{":
                yield from CallObject(reader, out).read()
            else:
                yield from self._named(reader, out)
            out.content(reader.drop())

    def _list(self, reader: TextReader, out: PartSink) -> Reading[None]:
        """Read objects from the bracket before them to the one behind them."""
        while True:
            reader.one()  # the bracket, or a comma
            if (yield from reader.skip_space()) != "{":
                return
            if not (yield from CallObject(reader, out).read()):
                return
            reader.keep()
            character = yield from reader.skip_space()
            if character == "]":
                reader.one()
                reader.drop()
                return
            if character != self._separator:
                return

    def _named(self, reader: TextReader, out: PartSink) -> Reading[None]:
        """Read a name and its arguments."""
        pieces: list[str] = []
        yield from reader.run(_NAME, pieces.append)
        character = yield from reader.skip_space()
        word = yield from reader.match(self._arguments, self._call_id)
        if word == self._call_id:
            yield from reader.run(_ID, ignore)
            word = yield from reader.match(self._arguments)
        if not pieces or not (word or character == "{"):
            return
        reader.drop()
        out.call("".join(pieces))
        yield from reader.skip_space()
        yield from read_value(reader, out.arguments, ())
