"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.call_object import CallObject
from services.detokenizer.answer.parts import PartSink
from services.detokenizer.answer.reader import Reading, TextReader

_TEXT = re.compile(r"[^<]+")


class HermesParser:
    """A JSON object in tags for each call; several objects in one pair of tags are read, too."""

    def __init__(self, markers: ToolMarkers) -> None:
        self._begin = markers.begin
        self._end = markers.end

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        is_open = False  # a call has begun, and its last tag is still to come
        while (yield from reader.run(_TEXT, out.content)):
            word = yield from reader.match(self._begin, self._end)
            if word == self._begin:
                is_open = yield from self._calls(reader, out)
            elif word and is_open:
                is_open = False
            else:
                out.content(word or reader.one())

    def _calls(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        """Read the calls after a first tag; false if there are none."""
        num_calls = 0
        reader.keep(self._begin)
        while (yield from reader.skip_space()) == "{":
            if not (yield from CallObject(reader, out, (self._end,)).read()):
                break
            num_calls += 1
            reader.keep()
        out.content(reader.drop())
        return num_calls > 0
