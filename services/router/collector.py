"""The sink of a request that is answered in one piece."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, PromptScored, TextOpened, TokenLogprob
from services.router.answer import Answer, AnswerParts
from services.router.usage import UsageTally


class _Gathered:
    """What has come of one choice."""

    __slots__ = ("ended", "logprobs", "parts", "prompt", "prompt_logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.parts: list[Part] = []
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: array[int] = array("i")
        self.prompt: TextOpened | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.ended: Ending | None = None


class Collector:
    """Gathers the choices of one response; `done` gets None at the end, or the failure."""

    __slots__ = (
        "_choices",
        "_num_open",
        "_usage",
        "_wants_logprobs",
        "done",
        "longest_prompt",
        "wants_ids",
    )

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
        self._choices = [_Gathered() for _ in range(num_choices)]
        self._usage = UsageTally(choices_per_prompt)

    def opened(self, choice: int, prompt: TextOpened) -> None:
        """Keep what a choice's prompt took."""
        self._choices[choice].prompt = prompt
        self.longest_prompt = max(self.longest_prompt, prompt.prompt_tokens)

    def scored(self, choice: int, scored: PromptScored) -> None:
        """Keep logprobs of a choice's prompt."""
        self._choices[choice].prompt_logprobs.extend(scored.tokens)

    def delta(
        self,
        choice: int,
        text: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        parts: tuple[Part, ...] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        """Keep new text, or the parts that were made of it."""
        gathered = self._choices[choice]
        if parts:
            gathered.parts.extend(parts)
        elif text:
            gathered.texts.append(text)
        if logprobs:
            gathered.logprobs.extend(logprobs)
        if token_ids:
            gathered.token_ids.extend(token_ids)

    def finished(self, choice: int, ended: Ending) -> None:
        """Keep a choice's end; the last one completes the response."""
        self._choices[choice].ended = ended
        self._usage.add(choice, ended.usage)
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def failed(self, failure: Failure) -> None:
        """End with a failure."""
        if not self.done.done():
            self.done.set_result(failure)

    def answers(self) -> list[Answer]:
        """Return all choices in order; only once `done` says that they are complete."""
        return [self._answer(gathered) for gathered in self._choices]

    @property
    def usage(self) -> Usage:
        """Tokens used by all choices together."""
        return self._usage.total()

    @property
    def finish_reasons(self) -> list[str]:
        """Why the choices ended, in order."""
        return [gathered.ended.reason for gathered in self._choices if gathered.ended is not None]

    def _answer(self, gathered: _Gathered) -> Answer:
        assert gathered.ended is not None
        parts = AnswerParts(gathered.parts)
        return Answer(
            text="".join(gathered.texts) + parts.content,
            logprobs=gathered.logprobs if self._wants_logprobs else None,
            ended=gathered.ended,
            reasoning=parts.reasoning,
            calls=parts.calls(),
            token_ids=tuple(gathered.token_ids),
            prompt=gathered.prompt,
            prompt_logprobs=tuple(gathered.prompt_logprobs),
        )
