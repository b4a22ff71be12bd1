"""The formats of answers by name: the parser of each, its markers, and its call ids."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, TypeAlias

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS, ToolMarkers
from common.messages.generate import StreamHeader
from common.parameter_kinds import Kinds
from services.detokenizer.answer.harmony import HarmonyCalls, HarmonyChannels
from services.detokenizer.answer.llama_pythonic import LlamaPythonicParser
from services.detokenizer.answer.parser import ReasoningParser, TaggedReasoning, ToolParser
from services.detokenizer.answer.tool_parsers import (
    DeepSeekParser,
    HermesParser,
    KimiParser,
    LlamaJsonParser,
    MistralParser,
)
from services.detokenizer.answer.xml_calls import XmlCallParser

NewParser: TypeAlias = Callable[[ToolMarkers, Kinds], ToolParser]
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

    parser: NewParser
    call_ids: CallIds = hex_ids


def _json(parser: Callable[[ToolMarkers], ToolParser]) -> NewParser:
    """Adapt a parser that needs no kinds, since the model itself writes JSON."""
    return lambda markers, kinds: parser(markers)


TOOL_PARSERS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(_json(HermesParser)),
    "llama_json": ToolFormat(_json(LlamaJsonParser)),
    "llama_pythonic": ToolFormat(_json(LlamaPythonicParser)),
    "mistral": ToolFormat(_json(MistralParser), mistral_ids),
    "deepseek": ToolFormat(_json(DeepSeekParser)),
    "qwen3_coder": ToolFormat(XmlCallParser),
    "glm": ToolFormat(XmlCallParser),
    "minimax": ToolFormat(XmlCallParser),
    "kimi_k2": ToolFormat(_json(KimiParser)),
    "harmony": ToolFormat(lambda markers, kinds: HarmonyCalls()),
}
REASONING_PARSERS: Final[Mapping[str, Callable[[bool], ReasoningParser]]] = {
    **{name: partial(TaggedReasoning, tags) for name, tags in REASONING_FORMATS.items()},
    "harmony": HarmonyChannels,
}


def tool_parser(name: str, kinds: Kinds | None = None) -> ToolParser | None:
    """Return a new parser of this format; none for a name that is not known here.

    `kinds` are those of the functions' parameters.
    """
    known = TOOL_PARSERS.get(name)
    return None if known is None else known.parser(TOOL_FORMATS[name], kinds or {})


def reasoning_parser(name: str, is_open: bool) -> ReasoningParser | None:
    """Return a new parser of this format; none for a name that is not known here."""
    known = REASONING_PARSERS.get(name)
    return None if known is None else known(is_open)


def call_ids(name: str) -> CallIds:
    known = TOOL_PARSERS.get(name)
    return hex_ids if known is None else known.call_ids


def markers(header: StreamHeader) -> tuple[str, ...]:
    """Return the markers of an answer's parsers, which are written out even if they are special."""
    words: tuple[str, ...] = ()
    if header.tool_format in TOOL_PARSERS:
        words = TOOL_FORMATS[header.tool_format].all
    if header.reasoning_format in REASONING_FORMATS:
        words += REASONING_FORMATS[header.reasoning_format].all
    return words
