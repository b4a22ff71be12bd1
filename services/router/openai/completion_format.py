"""The chunks and bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.messages.failure import Ending, Usage
from common.messages.logprobs import Candidate, Logprobs
from common.messages.text import TextOpened
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.openai.chunks import (
    AnswerOptions,
    ChunkFormat,
    CompletionLogprobs,
    full_usage,
    prompt_logprobs,
    stop_reason,
)
from services.router.sse import LOGPROBS, TEXT, EventTemplate, event

KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text; `first` is its first token, which has no logprob."""

    text: str
    first: Candidate | None = None


class CompletionFormat(ChunkFormat):
    """Writes text completions; `echoes` (one a prompt, or none) precede each choice's own text."""

    def __init__(
        self,
        head: ResponseHead,
        num_choices: int,
        options: AnswerOptions | None = None,
        echoes: Sequence[Echo] = (),
        num_prompts: int = 1,
    ) -> None:
        self._per_prompt = num_choices // num_prompts
        super().__init__(KIND, head, options, self._per_prompt)
        self._echoes = [echo for echo in echoes for _ in range(self._per_prompt)]
        self._waits = {index for index, echo in enumerate(self._echoes) if echo.first is not None}
        self._scored: dict[int, Logprobs] = {}
        as_ids = self._options.tokens_as_ids
        self._logprobs = [CompletionLogprobs(as_ids) for _ in range(num_choices)]
        self._templates = [
            EventTemplate(self._chunk(index, {"text": TEXT}, LOGPROBS))
            for index in range(num_choices)
        ]

    def opening(self, choice: int, prompt: TextOpened | None = None) -> bytes:
        """Render the echo of the prompt, unless it waits for its logprobs."""
        if self._usage is not None:
            self._usage.opened(choice, prompt)
        ids = self._options.token_ids and prompt is not None
        text = self._echoes[choice].text if self._echoes and choice not in self._waits else ""
        if not ids:
            return self._templates[choice].plain(text) if text else b""
        chunk = self._chunk(choice, {"text": text})
        assert prompt is not None
        chunk["choices"][0].update(prompt_token_ids=list(prompt.prompt_ids), token_ids=[])
        return event(chunk)

    def template(self, choice: int) -> EventTemplate | None:
        """Return the text chunk, where it is always the same."""
        plain = self._usage is None and not self._waits and not self._options.prompt_alone
        return self._templates[choice] if plain else None

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Render what is new; before the first of it the echo that waited for its logprobs."""
        if delta.scored:
            scored = self._scored.setdefault(choice, Logprobs())
            for each in delta.scored:
                scored.extend(each.logprobs)
        if self._usage is not None and not self._options.prompt_alone:
            self._usage.grew(choice, len(delta.token_ids))
        ids = delta.token_ids if self._options.token_ids else None
        text = delta.text + "".join(part.text for part in delta.parts if part.kind == "content")
        if not text and not delta.logprobs and not ids:
            return b""
        echo = self._waited(choice)
        if self._options.prompt_alone:
            return echo
        logprobs = self._logprobs[choice].take(delta.logprobs) if delta.logprobs else None
        if ids is None and self._usage is None:
            template = self._templates[choice]
            return echo + (template.scored(text, logprobs) if logprobs else template.plain(text))
        chunk = self._chunk(choice, {"text": text}, logprobs)
        if ids is not None:
            chunk["choices"][0]["token_ids"] = ids
        return echo + event(chunk)

    def ending(self, choice: int, ended: Ending) -> bytes:
        echo = self._waited(choice)
        if self._usage is not None and not self._options.prompt_alone:
            self._usage.ended(choice, ended)
        chunk = self._chunk(choice, {"text": ""}, finish_reason=self._finish_reason(ended))
        chunk["choices"][0].update(self._stop_reason(ended))
        return echo + event(chunk)

    def closing(self, usage: Usage) -> bytes:
        return super().closing(self._shown(usage))

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        """Build a `text_completion`."""
        for index, answer in enumerate(answers):
            self._scored[index] = answer.prompt_logprobs
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        total = full_usage(self._shown(usage), (answer.ended for answer in answers))
        return {**self._head_of(KIND), "choices": choices, "usage": total}

    def _choice(self, index: int, answer: CompleteAnswer) -> dict[str, Any]:
        options = self._options
        text, tokens = answer.text, answer.logprobs
        if options.prompt_alone:
            text, tokens = "", None if answer.logprobs is None else Logprobs()
        echo = self._echoes[index] if self._echoes else None
        first = None if echo is None else echo.first
        if first is not None and tokens is not None:
            tokens = self._scores(index) + tokens
        choice = {
            "index": index,
            "text": text if echo is None else echo.text + text,
            "logprobs": None if tokens is None else self._logprobs[index].take(tokens, first),
            "finish_reason": self._finish_reason(answer.ended),
            **self._stop_reason(answer.ended),
        }
        if options.prompt_logprobs:
            scores = self._scores(index)
            choice["prompt_logprobs"] = prompt_logprobs(scores, options.tokens_as_ids)
        if options.token_ids:
            prompt = answer.prompt
            choice["prompt_token_ids"] = None if prompt is None else list(prompt.prompt_ids)
            choice["token_ids"] = [] if options.prompt_alone else answer.token_ids
        return choice

    def _waited(self, choice: int) -> bytes:
        """Render the echo that waited for its logprobs, once."""
        if choice not in self._waits:
            return b""
        self._waits.discard(choice)
        echo = self._echoes[choice]
        logprobs = self._logprobs[choice].take(self._scores(choice), echo.first)
        return self._templates[choice].scored(echo.text, logprobs)

    def _scores(self, choice: int) -> Logprobs:
        """Return the logprobs of a choice's prompt, which came with it or with a sibling."""
        first = choice - choice % self._per_prompt
        siblings = range(first, first + self._per_prompt)
        return max((self._scored.get(each, Logprobs()) for each in (choice, *siblings)), key=len)

    def _finish_reason(self, ended: Ending) -> str:
        return "length" if self._options.prompt_alone else ended.reason

    def _stop_reason(self, ended: Ending) -> dict[str, Any]:
        return {} if self._options.prompt_alone else stop_reason(ended)

    def _shown(self, usage: Usage) -> Usage:
        return replace(usage, completion_tokens=0) if self._options.prompt_alone else usage
