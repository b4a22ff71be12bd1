"""Answers as every API renders them: complete ones, and what is new of one that streams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from common.messages.failure import Ending
from common.messages.text import Part, PromptScored, TextOpened, TokenLogprob


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What all chunks of a response have in common."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an answer makes; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str

    def arguments_object(self) -> dict[str, Any]:
        """Parse the arguments; if they were cut off, the object holds the text as it is."""
        try:
            value = json.loads(self.arguments) if self.arguments.strip() else {}
        except ValueError:
            value = None
        return value if isinstance(value, dict) else {"INVALID_JSON": self.arguments}


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete choice; `logprobs` is None where none were asked for.

    `token_ids` are there only where the client wants them, `prompt` where the ring said it, and
    `prompt_logprobs` where they were asked for: of each prompt token from the second on.
    """

    text: str
    logprobs: list[TokenLogprob] | None
    ended: Ending
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt: TextOpened | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Delta:
    """What is new of one streaming choice, merged while it waits to be written.

    Of a parsed answer there are `parts`, of any other there is `text`.
    """

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.parts or self.token_ids or self.scored)

    def take(
        self,
        text: str,
        logprobs: Iterable[TokenLogprob],
        parts: Iterable[Part],
        token_ids: Iterable[int],
    ) -> None:
        """Take one more row; text of a row with parts is what they were made of, and not shown."""
        has_parts = False
        for part in parts:
            has_parts = True
            self._take_part(part)
        if not has_parts:
            self.text += text
        self.logprobs.extend(logprobs)
        self.token_ids.extend(token_ids)

    def size(self) -> int:
        """Characters that wait, about."""
        return len(self.text) + sum(len(part.text) for part in self.parts)

    def _take_part(self, part: Part) -> None:
        if part.kind != "call" and not part.text:
            return
        last = self.parts[-1] if self.parts else None
        if (
            last is not None
            and part.kind != "call"
            and last.kind == part.kind
            and last.index == part.index
        ):
            self.parts[-1] = Part(part.kind, last.text + part.text, part.index)
        else:
            self.parts.append(part)


class AnswerParts:
    """The parts of a complete answer, put together."""

    __slots__ = ("_arguments", "_begun", "content", "reasoning")

    def __init__(self, parts: Iterable[Part]) -> None:
        content: list[str] = []
        reasoning: list[str] = []
        self._begun: dict[int, Part] = {}
        self._arguments: dict[int, list[str]] = {}
        for part in parts:
            match part.kind:
                case "content":
                    content.append(part.text)
                case "reasoning":
                    reasoning.append(part.text)
                case "call":
                    self._begun[part.index] = part
                case "arguments":
                    self._arguments.setdefault(part.index, []).append(part.text)
        self.content = "".join(content)
        self.reasoning = "".join(reasoning)

    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls in their order."""
        return tuple(
            ToolCall(call.id, call.text, "".join(self._arguments.get(index, ())))
            for index, call in sorted(self._begun.items())
        )
