"""Llama 3: `{"name": "f", "parameters": {…}}`, several with `;` or newlines between them."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.call_object import CallObject
from services.detokenizer.answer.parts import PartSink
from services.detokenizer.answer.reader import SPACE, Reading, TextReader

_TEXT = re.compile(r"[^\n<]+")


class LlamaJsonParser:
    """JSON objects at the beginning of the answer or of a line, or after the marker."""

    def __init__(self, markers: ToolMarkers) -> None:
        self._marker = markers.begin
        self._separator = markers.separator

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        line_starts = True
        while True:
            if line_starts and (yield from reader.run(SPACE, out.content)) == "{":
                reader.keep()
                line_starts = yield from self._calls(reader, out)
                continue
            line_starts = False
            character = yield from reader.run(_TEXT, out.content)
            if not character:
                return
            if character == "\n":
                line_starts = True
            elif (yield from reader.match(self._marker)):
                reader.keep(self._marker)
                if (yield from reader.skip_space()) == "{":
                    line_starts = yield from self._calls(reader, out)
                else:
                    out.content(reader.drop())
            else:
                out.content(reader.one())

    def _calls(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        """Read calls from their first brace on; return whether a line begins behind them."""
        character = "{"
        while character == "{":
            if not (yield from CallObject(reader, out, cautious=True).read()):
                break
            reader.keep()
            character = yield from reader.skip_space()
            if character == self._separator:
                reader.one()
                character = yield from reader.skip_space()
            if not character:
                reader.drop()  # a last separator
        left = reader.drop()
        out.content(left)
        return left.rstrip(" \t").endswith("\n")
