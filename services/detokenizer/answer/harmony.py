"""Harmony, the messages that gpt-oss writes: `<|channel|>analysis<|message|>…<|end|>` and the like.

The header of a message names its channel, and the recipient of a call. Reasoning is taken out of
the text first, as in other formats; calls stay in it as they are, headers and all, for the parser
of calls. A text without any header is content: the prompt has begun its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from common.chat_formats import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
)
from services.detokenizer.answer.call_object import read_value
from services.detokenizer.answer.parser import PartSink
from services.detokenizer.answer.reader import SPACE, Reading, TextReader, ignore

_BETWEEN = "\n\n"  # two messages of one kind
_TO = "to="
_UP_TO_TAG = re.compile(r"[^<]+")
_HEADER_TEXT = re.compile(r"[\w .=:/-]+")
_HEADER_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE)
_BEGINS, _ENDS = (START, CHANNEL), (END, CALL, RETURN)
_RECIPIENT = rf"(?:{_TO}(?:functions\.)?([^\s<]+)\s*)?"
_CHANNELS = rf"(?:{re.escape(CHANNEL)}\w+\s*)*"  # models may write one twice
_CALL = re.compile(
    rf"\s*(?:{re.escape(START)}assistant\s*)?{_RECIPIENT}{_CHANNELS}{_RECIPIENT}{_CHANNELS}"
    rf"(?:{re.escape(CONSTRAIN)})?\s*\w*\s*{re.escape(MESSAGE)}"
)
# The headers of messages without a recipient, and their channels.
_PLAIN = {
    f"{start}{CHANNEL}{channel}{kind}{MESSAGE}": channel
    for start in ("", f"{START}assistant")
    for channel in ("analysis", "commentary", "final")
    for kind in ("", f" {CONSTRAIN}json", f"{CONSTRAIN}json")
}


class HarmonyChannels:
    """Tells the messages of the channel `analysis`, which are reasoning, from the others.

    With `is_open` the text begins inside of one.
    """

    def __init__(self, is_open: bool) -> None:
        self.inside = is_open

    def parse(
        self,
        reader: TextReader,
        reasoning: Callable[[str], object],
        content: Callable[[str], object],
    ) -> Reading[None]:
        seen: set[bool] = set()  # whether reasoning was there, and content
        while True:
            header = "" if self.inside else (yield from _header(reader))
            channel = "analysis" if self.inside else _PLAIN.get(header.strip())
            if channel is None:
                content(header or _not_a_header(reader))
            self.inside = channel == "analysis"
            emit = reasoning if self.inside else content
            if channel is not None:
                if self.inside in seen:
                    emit(_BETWEEN)
                seen.add(self.inside)
            end = yield from _body(reader, emit)
            if header and channel is None:
                content(end)
            self.inside = False
            if not (yield from reader.peek()):
                return


class HarmonyCalls:
    """Finds messages with a recipient: `<|channel|>commentary to=functions.f<|message|>{…}`.

    The recipient may also stand before the channel. What is called without `functions.` is a tool
    of the model's own.
    """

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        begins = True
        while begins or (yield from reader.run(_UP_TO_TAG, out.content)):
            if begins or (yield from reader.sees(*_BEGINS)):
                header = yield from _header(reader)
                found = _CALL.fullmatch(header)
                name = found and (found[1] or found[2])
                if not name:
                    out.content(header or reader.drop())
                else:
                    out.call(name)
                    yield from self._arguments(reader, out)
            else:
                out.content(reader.one())
            begins = False

    def _arguments(self, reader: TextReader, out: PartSink) -> Reading[None]:
        """Read a call's body: JSON, or for some of the model's own tools any text."""
        character = yield from reader.skip_space()
        if not character or (yield from reader.sees(*_ENDS)):
            out.arguments("{}")
        yield from read_value(reader, out.arguments, (*_BEGINS, *_ENDS))
        space: list[str] = []
        while (yield from reader.run(SPACE, space.append)):
            if (yield from reader.match(*_ENDS)) or (yield from reader.sees(*_BEGINS)):
                return
            out.arguments("".join(space) + reader.one())
            space.clear()


def _header(reader: TextReader) -> Reading[str]:
    """Read the header of a message; if none comes, return nothing, and the reader has kept all."""
    reader.keep()
    yield from reader.skip_space()
    if not (yield from reader.sees(_TO, *_HEADER_MARKERS)):
        return ""
    word = ""
    while word != MESSAGE:
        yield from reader.run(_HEADER_TEXT, ignore)
        word = yield from reader.match(*_HEADER_MARKERS)
        if not word:
            return ""
    return reader.drop()


def _not_a_header(reader: TextReader) -> str:
    """Return what was kept in search of a header; nothing if the text ended inside of one."""
    text = reader.drop()
    if reader.ended:
        text += reader.rest()
        if any(header.startswith(text) for header in _PLAIN):
            return ""
    return text


def _body(reader: TextReader, emit: Callable[[str], object]) -> Reading[str]:
    """Read a message up to its end, and return what marks it; nothing if another one begins."""
    while (yield from reader.run(_UP_TO_TAG, emit)):
        if word := (yield from reader.match(*_ENDS)):
            return word
        if (yield from reader.sees(*_BEGINS)):
            return ""
        emit(reader.one())
    return ""
