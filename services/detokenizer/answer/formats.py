"""The formats of answers by name: parsers, markers and call ids; reasoning between two markers."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningMarkers, ToolMarkers
from common.messages.generate import StreamHeader
from services.detokenizer.answer.llama_pythonic import LlamaPythonicParser
from services.detokenizer.answer.parser import ReasoningParser, ToolParser
from services.detokenizer.answer.reader import Reading, TextReader, ignore
from services.detokenizer.answer.tool_parsers import (
    DeepSeekParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)

CallIds: TypeAlias = Callable[[str, int, int], str]
"""Makes an id of a request's key, the number of the choice and the number of the call."""

ALPHABET = string.digits + string.ascii_letters
_NEWLINES = re.compile(r"\n+")
MISTRAL_LENGTH = 9  # Mistral's templates refuse ids of any other form


def hex_ids(key: str, choice: int, index: int) -> str:
    """Make an id as OpenAI's look: `call_` and 24 hexadecimal digits."""
    return f"call_{_digest(key, choice, index).hex()}"


def mistral_ids(key: str, choice: int, index: int) -> str:
    """Make an id of nine letters and digits."""
    number = int.from_bytes(_digest(key, choice, index), "big")
    characters = []
    for _ in range(MISTRAL_LENGTH):
        number, place = divmod(number, len(ALPHABET))
        characters.append(ALPHABET[place])
    return "".join(characters)


def _digest(key: str, choice: int, index: int) -> bytes:
    text = f"{choice}/{index}/{key}"
    return blake2b(text.encode("utf-8", "replace"), digest_size=12).digest()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way of writing calls: its parser, and how ids of its calls look."""

    parser: Callable[[ToolMarkers], ToolParser]
    call_ids: CallIds = hex_ids


TOOL_PARSERS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(HermesParser),
    "llama_json": ToolFormat(LlamaJsonParser),
    "llama_pythonic": ToolFormat(LlamaPythonicParser),
    "mistral": ToolFormat(MistralParser, mistral_ids),
    "deepseek": ToolFormat(DeepSeekParser),
}


class TagsParser:
    """Reasoning is what stands between two markers, `<think>` and the like, before an answer.

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


REASONING_PARSERS: Final[Mapping[str, Callable[[ReasoningMarkers, bool], ReasoningParser]]] = (
    dict.fromkeys(REASONING_FORMATS, TagsParser)
)


def tool_parser(name: str) -> ToolParser | None:
    """Return a new parser of this format; none for a name that is not known here."""
    known = TOOL_PARSERS.get(name)
    return None if known is None else known.parser(TOOL_FORMATS[name])


def reasoning_parser(name: str, is_open: bool) -> ReasoningParser | None:
    """Return a new parser of this format; none for a name that is not known here."""
    known = REASONING_PARSERS.get(name)
    return None if known is None else known(REASONING_FORMATS[name], is_open)


def call_ids(name: str) -> CallIds:
    """Return what makes ids for the calls of this format."""
    known = TOOL_PARSERS.get(name)
    return hex_ids if known is None else known.call_ids


def markers(header: StreamHeader) -> tuple[str, ...]:
    """Return the markers of an answer's parsers, which are written out even if they are special."""
    words: tuple[str, ...] = ()
    if header.tool_format in TOOL_PARSERS:
        words = TOOL_FORMATS[header.tool_format].all
    if header.reasoning_format in REASONING_PARSERS:
        reasoning = REASONING_FORMATS[header.reasoning_format]
        words += (reasoning.begin, reasoning.end)
    return words
