"""Parsers of tool calls whose arguments are JSON: Hermes, Llama 3, Mistral, DeepSeek, Kimi."""

from __future__ import annotations

import re

from common.chat_formats import ToolMarkers
from services.detokenizer.answer.call_object import CallObject, read_value
from services.detokenizer.answer.parser import PartSink
from services.detokenizer.answer.reader import SPACE, Reading, TextReader, ignore

_UP_TO_BRACKET = re.compile(r"[^\[]+")
_UP_TO_TAG = re.compile(r"[^<]+")
_UP_TO_TAG_OR_LINE = re.compile(r"[^<\n]+")
_MISTRAL_NAME = re.compile(r"[\w.:/-]+")
_MISTRAL_ID = re.compile(r"\w+")
_DEEPSEEK_NAME = re.compile(r"[^<\n{`]+")
_DEEPSEEK_TYPE = "function"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_FENCE = "```"
_LANGUAGE = "json"


class HermesParser:
    """Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.

    Several objects in one pair of tags are read, too.
    """

    def __init__(self, markers: ToolMarkers) -> None:
        self._begin = markers.begin
        self._end = markers.end

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        is_open = False  # a call has begun, and its last tag is still to come
        while (yield from reader.run(_UP_TO_TAG, out.content)):
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


class LlamaJsonParser:
    """Llama 3: `{"name": "f", "parameters": {…}}`, several with `;` or newlines between them.

    The objects stand at the beginning of the answer or of a line, or after the marker.
    """

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
            character = yield from reader.run(_UP_TO_TAG_OR_LINE, out.content)
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


class MistralParser:
    """Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, later `[TOOL_CALLS]f[ARGS]{…}`.

    After the marker comes a list of objects, an object, or a name and its arguments. An id that the
    model gives to a call itself is left out.
    """

    def __init__(self, markers: ToolMarkers) -> None:
        self._begin = markers.begin
        self._arguments = markers.arguments
        self._call_id = markers.call_id
        self._separator = markers.separator

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        while (yield from reader.run(_UP_TO_BRACKET, out.content)):
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
        pieces: list[str] = []
        yield from reader.run(_MISTRAL_NAME, pieces.append)
        character = yield from reader.skip_space()
        word = yield from reader.match(self._arguments, self._call_id)
        if word == self._call_id:
            yield from reader.run(_MISTRAL_ID, ignore)
            word = yield from reader.match(self._arguments)
        if not pieces or not (word or character == "{"):
            return
        reader.drop()
        out.call("".join(pieces))
        yield from reader.skip_space()
        yield from read_value(reader, out.arguments, ())


class DeepSeekParser:
    """DeepSeek: calls between tokens of their own, all of them inside of one more pair of markers.

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
        while (yield from reader.run(_UP_TO_TAG, out.content)):
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
        yield from reader.run(_UP_TO_TAG_OR_LINE, pieces.append)
        if not (yield from reader.match(self._separator)):
            return False
        character = yield from reader.skip_space()
        bare = character == "{" or bool((yield from reader.sees(self._end)))
        if not bare:
            if "".join(pieces).strip() != _DEEPSEEK_TYPE:
                return False
            pieces.clear()
            character = yield from reader.run(_DEEPSEEK_NAME, pieces.append)
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


class KimiParser(DeepSeekParser):
    """Kimi K2: calls as DeepSeek V3.1 writes them, each with its id where the name would be.

    An id is `functions.f:0`. Templates show the ids to the model again, so they are kept.
    """

    def _call(self, reader: TextReader, out: PartSink) -> Reading[bool]:
        pieces: list[str] = []
        yield from reader.run(_UP_TO_TAG_OR_LINE, pieces.append)
        call_id = "".join(pieces).strip()
        found = _KIMI_ID.fullmatch(call_id)
        if found is None or not (yield from reader.match(self._separator)):
            return False
        reader.drop()
        out.call(found[1], call_id if call_id != found[1] else "")
        yield from self._read_arguments(reader, out)
        return True
