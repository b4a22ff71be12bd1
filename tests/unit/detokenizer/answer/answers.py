"""Running the parsers in tests, and what their parts come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.chat_formats import TOOL_FORMATS
from common.messages.text import Part
from common.parameter_kinds import Kinds
from services.detokenizer.answer.formats import reasoning_parser, tool_parser
from services.detokenizer.answer.parser import AnswerParser

TOOL_NAMES = tuple(TOOL_FORMATS)


@dataclass
class Answer:
    """Parts joined: calls as [name, arguments] in their order."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    order: str = ""  # kinds in the order in which they first came: c, r, t

    def __post_init__(self) -> None:
        self.calls = [list(call) for call in self.calls]


def joined(parts: Iterable[Part]) -> Answer:
    """Join parts as a client does."""
    answer = Answer()
    for part in parts:
        match part.kind:
            case "content":
                answer.content += part.text
            case "reasoning":
                answer.reasoning += part.text
            case "call":
                assert part.index == len(answer.calls)
                assert part.id == f"id{part.index}" or part.id.endswith(tuple("0123456789"))
                answer.calls.append([part.text, ""])
            case "arguments":
                assert part.index == len(answer.calls) - 1
                answer.calls[part.index][1] += part.text
        if part.text:
            letter = {"content": "c", "reasoning": "r"}.get(part.kind, "t")
            answer.order += "" if answer.order.endswith(letter) else letter
    return answer


def new_parser(
    tools: str = "", reasoning: str = "", is_open: bool = False, kinds: Kinds | None = None
) -> AnswerParser:
    """Make a parser whose calls have the ids id0, id1, …"""
    return AnswerParser(
        reasoning_parser(reasoning, is_open), tool_parser(tools, kinds), lambda index: f"id{index}"
    )


def parse(
    pieces: Sequence[str],
    tools: str = "",
    reasoning: str = "",
    is_open: bool = False,
    kinds: Kinds | None = None,
) -> Answer:
    """Parse a whole answer that comes in these pieces."""
    parser = new_parser(tools, reasoning, is_open, kinds)
    parts: list[Part] = []
    for piece in pieces:
        new = parser.push(piece)
        assert new  # a parsed answer's rows always have a part
        parts += new
    return joined([*parts, *parser.finish()])
