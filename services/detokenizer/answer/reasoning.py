"""Reasoning between two markers: `<think>…</think>` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable

from common.chat_formats import ReasoningMarkers
from services.detokenizer.answer.reader import Reading, TextReader, ignore

_NEWLINES = re.compile(r"\n+")


class TagsParser:
    """Takes for reasoning what stands between two markers at the beginning of an answer.

    Markers further on are content: an answer may speak of them. Newlines next to the markers are
    left out. `is_open` says that the prompt has the first marker already; a model may write it
    again.
    """

    def __init__(self, markers: ReasoningMarkers, is_open: bool) -> None:
        self.inside = is_open
        self._begin = markers.begin
        self._end = markers.end
        first = re.escape(markers.end[0])
        self._text = re.compile(rf"[^\n{first}]+")

    def parse(
        self,
        reader: TextReader,
        reasoning: Callable[[str], object],
        content: Callable[[str], object],
    ) -> Reading[None]:
        reader.keep()
        yield from reader.skip_space()
        found = yield from reader.match(self._begin)
        before = reader.drop()
        if not found and not self.inside:
            content(before)
            return
        self.inside = True
        if not found:
            before = before.lstrip("\n")
            reasoning(before)
        yield from self._reason(reader, reasoning, begun=bool(before) and not found)
        self.inside = False
        yield from reader.run(_NEWLINES, ignore)

    def _reason(
        self, reader: TextReader, reasoning: Callable[[str], object], begun: bool
    ) -> Reading[None]:
        """Read up to the last marker; newlines wait for what follows them."""
        newlines: list[str] = []
        while True:
            character = yield from reader.run(_NEWLINES, newlines.append)
            if character and (yield from reader.match(self._end)):
                return
            if not begun:
                newlines.clear()
            if newlines:
                reasoning("".join(newlines))
                newlines.clear()
            if not character:
                return
            begun = True
            reasoning(reader.one())
            yield from reader.run(self._text, reasoning)
