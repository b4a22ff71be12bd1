"""The chunks and bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Candidate, TextOpened, TokenLogprob
from services.router.answer import CompleteAnswer, Delta, ResponseHead
from services.router.openai.chunks import (
    AnswerOptions,
    CompletionLogprobs,
    RunningUsage,
    closing,
    full_usage,
    head_of,
    prompt_logprobs,
    stop_reason,
)
from services.router.sse import DONE, LOGPROBS, TEXT, EventTemplate, error_event, event

KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text; `first` is its first token, which no logprob is known of."""

    text: str
    first: Candidate | None = None


class CompletionFormat:
    """Text completion chunks and bodies; of a stream it has what is not said yet.

    `echoes` (one a prompt, or none at all) come before each choice's own text.
    """

    def __init__(
        self,
        head: ResponseHead,
        num_choices: int,
        options: AnswerOptions | None = None,
        echoes: Sequence[Echo] = (),
        num_prompts: int = 1,
    ) -> None:
        self._head = head
        self._options = options or AnswerOptions()
        self._per_prompt = num_choices // num_prompts
        self._echoes = [echo for echo in echoes for _ in range(self._per_prompt)]
        self._waits = {index for index, echo in enumerate(self._echoes) if echo.first is not None}
        self._scored: dict[int, list[TokenLogprob]] = {}
        as_ids = self._options.tokens_as_ids
        self._usage = RunningUsage(self._per_prompt) if self._options.continuous_usage else None
        self._logprobs = [CompletionLogprobs(as_ids) for _ in range(num_choices)]
        self._templates = [
            EventTemplate(self._chunk(index, TEXT, LOGPROBS)) for index in range(num_choices)
        ]

    def opening(self, choice: int, prompt: TextOpened | None = None) -> bytes:
        """Render the echo of the prompt, if it was asked for and need not wait for logprobs."""
        if self._usage is not None:
            self._usage.opened(choice, prompt)
        ids = self._options.token_ids and prompt is not None
        text = self._echoes[choice].text if self._echoes and choice not in self._waits else ""
        if not ids:
            return self._templates[choice].plain(text) if text else b""
        chunk = self._chunk(choice, text)
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
            scored = self._scored.setdefault(choice, [])
            for each in delta.scored:
                scored.extend(each.tokens)
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
        chunk = self._chunk(choice, text, logprobs)
        if ids is not None:
            chunk["choices"][0]["token_ids"] = ids
        return echo + event(chunk)

    def ending(self, choice: int, ended: Ending) -> bytes:
        """Render the chunk with the finish reason."""
        echo = self._waited(choice)
        if self._usage is not None and not self._options.prompt_alone:
            self._usage.ended(choice, ended)
        chunk = self._chunk(choice, "", finish_reason=self._finish_reason(ended))
        chunk["choices"][0].update(self._stop_reason(ended))
        return echo + event(chunk)

    def closing(self, usage: Usage) -> bytes:
        """Render the usage chunk, if it was asked for, and the end."""
        wanted = self._total(usage, ()) if self._options.include_usage else None
        return closing(head_of(self._head, KIND), wanted)

    def failed(self, failure: Failure) -> bytes:
        """Render the error and the end."""
        return error_event(failure) + DONE

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        """Build a `text_completion`."""
        for index, answer in enumerate(answers):
            self._scored[index] = list(answer.prompt_logprobs)
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        total = self._total(usage, [answer.ended for answer in answers])
        return {**head_of(self._head, KIND), "choices": choices, "usage": total}

    def _choice(self, index: int, answer: CompleteAnswer) -> dict[str, Any]:
        options = self._options
        text, tokens = answer.text, answer.logprobs
        if options.prompt_alone:
            text, tokens = "", None if answer.logprobs is None else []
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

    def _scores(self, choice: int) -> list[TokenLogprob]:
        """Return the logprobs of a choice's prompt, which came with it or with a sibling."""
        first = choice - choice % self._per_prompt
        siblings = range(first, first + self._per_prompt)
        return max((self._scored.get(each, []) for each in (choice, *siblings)), key=len)

    def _finish_reason(self, ended: Ending) -> str:
        return "length" if self._options.prompt_alone else ended.reason

    def _stop_reason(self, ended: Ending) -> dict[str, Any]:
        return {} if self._options.prompt_alone else stop_reason(ended)

    def _total(self, usage: Usage, endings: Sequence[Ending]) -> dict[str, Any]:
        if self._options.prompt_alone:
            usage = Usage(usage.prompt_tokens, usage.cached_tokens, 0)
        return full_usage(usage, endings)

    def _chunk(
        self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**head_of(self._head, KIND), "choices": [choice]}
        if self._usage is not None:
            return {**chunk, "usage": self._usage.object()}
        return {**chunk, "usage": None} if self._options.include_usage else chunk
