"""The formats of answers by name: the parser of each, its markers, and its call ids."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS, ToolMarkers
from common.messages.generate import StreamHeader
from services.detokenizer.answer.llama_pythonic import LlamaPythonicParser
from services.detokenizer.answer.parser import ReasoningParser, ToolParser
from services.detokenizer.answer.tool_parsers import (
    DeepSeekParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)

CallIds: TypeAlias = Callable[[str, int, int], str]
"""Makes an id of a request's key, the number of the choice and the number of the call."""

ALPHABET = string.digits + string.ascii_letters
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


def tool_parser(name: str) -> ToolParser | None:
    """Return a new parser of this format; none for a name that is not known here."""
    known = TOOL_PARSERS.get(name)
    return None if known is None else known.parser(TOOL_FORMATS[name])


def reasoning_parser(name: str, is_open: bool) -> ReasoningParser | None:
    """Return a new parser of this format; none for a name that is not known here."""
    known = REASONING_FORMATS.get(name)
    return None if known is None else ReasoningParser(known, is_open)


def call_ids(name: str) -> CallIds:
    known = TOOL_PARSERS.get(name)
    return hex_ids if known is None else known.call_ids


def markers(header: StreamHeader) -> tuple[str, ...]:
    """Return the markers of an answer's parsers, which are written out even if they are special."""
    words: tuple[str, ...] = ()
    if header.tool_format in TOOL_PARSERS:
        words = TOOL_FORMATS[header.tool_format].all
    if header.reasoning_format in REASONING_FORMATS:
        reasoning = REASONING_FORMATS[header.reasoning_format]
        words += (reasoning.begin, reasoning.end)
    return words
