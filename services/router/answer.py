"""Answers as every API renders them: complete ones and a stream's deltas; where they go."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.messages.arrays import int32s
from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.text import Part, TextOpened


class Sink(Protocol):
    """Where the text of one request goes; calls come in the order of the messages."""

    @property
    def wants_ids(self) -> bool:
        """Whether `delta` gets the ids of the tokens; read once."""
        ...

    def opened(self, choice: int, prompt: TextOpened) -> None:
        """Take the prompt's token counts, before the choice's first text."""
        ...

    def scored(self, choice: int, scored: PromptLogprobs) -> None:
        """Take logprobs of the prompt, in order."""
        ...

    def delta(
        self,
        choice: int,
        text: str,
        logprobs: Logprobs | None = None,
        parts: tuple[Part, ...] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        """Take new text of a choice, which may be empty; where there are parts, they are shown."""
        ...

    def waiting(self) -> None:
        """Show the client that its answer is still to come; called now and then."""
        ...

    def finished(self, choice: int, ended: Ending) -> None:
        """Take the end of a choice (`stop` or `length`), the last call for it."""
        ...

    def failed(self, failure: Failure) -> None:
        """Take the failure of the whole request, the last call of all."""
        ...


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all chunks of a response share."""

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
class CompleteAnswer:
    """One complete choice; `logprobs` is None where the client wants none.

    `token_ids` and `prompt_logprobs` (of each prompt token from the second on) are empty where the
    client does not want them; `prompt` has the prompt's token counts if the ring sent them.
    """

    text: str
    logprobs: Logprobs | None
    ended: Ending
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt: TextOpened | None = None
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)


@dataclass(slots=True)
class Delta:
    """New output of one streaming choice, merged while it waits to be written.

    A parsed answer has `parts`, any other has `text`.
    """

    text: str = ""
    logprobs: Logprobs | None = None
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.parts or self.token_ids or self.scored)

    def take(
        self,
        text: str,
        logprobs: Logprobs | None,
        parts: Iterable[Part],
        token_ids: Iterable[int],
    ) -> None:
        """Add a row; if it has parts, they replace its text, from which they were parsed."""
        has_parts = False
        for part in parts:
            has_parts = True
            self._take_part(part)
        if not has_parts:
            self.text += text
        if logprobs is not None:
            self.logprobs = self.logprobs or Logprobs()
            self.logprobs.extend(logprobs)
        self.token_ids.extend(token_ids)

    def size(self) -> int:
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
    """The joined parts of a complete answer."""

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
        return tuple(
            ToolCall(call.id, call.text, "".join(self._arguments.get(index, ())))
            for index, call in sorted(self._begun.items())
        )


class UsageTally:
    """The usage of one response: a prompt counts once, however many choices continue it."""

    __slots__ = ("_accepted", "_choices_per_prompt", "_completion", "_prompts", "_rejected")

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._prompts: dict[int, Usage] = {}
        self._completion = self._accepted = self._rejected = 0

    def add(self, choice: int, usage: Usage) -> None:
        prompt = choice // self._choices_per_prompt
        known = self._prompts.get(prompt)
        # Later choices find the prompt cached by the first one: the smallest number counts.
        if known is None or usage.cached_tokens < known.cached_tokens:
            self._prompts[prompt] = usage
        self._completion += usage.completion_tokens
        self._accepted += usage.accepted_tokens
        self._rejected += usage.rejected_tokens

    def total(self) -> Usage:
        prompts = self._prompts.values()
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            completion_tokens=self._completion,
            accepted_tokens=self._accepted,
            rejected_tokens=self._rejected,
        )


@dataclass(eq=False, slots=True)
class _ChoiceParts:
    """The collected output of one choice."""

    texts: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=Logprobs)
    token_ids: array[int] = field(default_factory=int32s)
    prompt: TextOpened | None = None
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    ended: Ending | None = None


class AnswerCollector:
    """The sink of a response in one piece; `done` gets None at the end, or the failure."""

    def __init__(
        self,
        num_choices: int,
        choices_per_prompt: int,
        wants_logprobs: bool,
        done: asyncio.Future[Failure | None],
        wants_ids: bool = False,
    ) -> None:
        self.done = done
        self.wants_ids = wants_ids
        self.longest_prompt = 0  # in tokens
        self._num_open = num_choices
        self._wants_logprobs = wants_logprobs
        self._choices = [_ChoiceParts() for _ in range(num_choices)]
        self._usage = UsageTally(choices_per_prompt)

    def opened(self, choice: int, prompt: TextOpened) -> None:
        self._choices[choice].prompt = prompt
        self.longest_prompt = max(self.longest_prompt, prompt.prompt_tokens)

    def scored(self, choice: int, scored: PromptLogprobs) -> None:
        self._choices[choice].prompt_logprobs.extend(scored.logprobs)

    def delta(
        self,
        choice: int,
        text: str,
        logprobs: Logprobs | None = None,
        parts: tuple[Part, ...] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        output = self._choices[choice]
        if parts:
            output.parts.extend(parts)
        elif text:
            output.texts.append(text)
        if logprobs:
            output.logprobs.extend(logprobs)
        if token_ids:
            output.token_ids.extend(token_ids)

    def waiting(self) -> None:
        """There is nothing to show before the whole answer is there."""

    def finished(self, choice: int, ended: Ending) -> None:
        self._choices[choice].ended = ended
        self._usage.add(choice, ended.usage)
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def failed(self, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_result(failure)

    def answers(self) -> list[CompleteAnswer]:
        """Return all choices in order, once `done` says that they are complete."""
        return [self._answer(output) for output in self._choices]

    @property
    def usage(self) -> Usage:
        return self._usage.total()

    @property
    def finish_reasons(self) -> list[str]:
        return [output.ended.reason for output in self._choices if output.ended is not None]

    def _answer(self, output: _ChoiceParts) -> CompleteAnswer:
        assert output.ended is not None
        parts = AnswerParts(output.parts)
        return CompleteAnswer(
            text="".join(output.texts) + parts.content,
            logprobs=output.logprobs if self._wants_logprobs else None,
            ended=output.ended,
            reasoning=parts.reasoning,
            calls=parts.calls(),
            token_ids=tuple(output.token_ids),
            prompt=output.prompt,
            prompt_logprobs=output.prompt_logprobs,
        )
