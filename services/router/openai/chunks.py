"""What the chunks and bodies of both endpoints have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.messages.failure import Ending, Usage
from common.messages.text import TextOpened
from services.router.answer import ResponseHead
from services.router.sse import DONE, event, usage_object


def head_of(head: ResponseHead, kind: str) -> dict[str, Any]:
    """Build the fields that every chunk or body begins with."""
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }


def stop_reason(ended: Ending) -> dict[str, Any]:
    """Say which stop string or stop token matched: not in OpenAI's shape, so only where one did."""
    return {} if ended.stop is None else {"stop_reason": ended.stop}


def closing(head: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
    """Render the usage chunk, if there is to be one, and the end of a stream."""
    if usage is None:
        return DONE
    return event({**head, "choices": [], "usage": usage}) + DONE


def full_usage(usage: Usage, endings: Iterable[Ending]) -> dict[str, Any]:
    """Build OpenAI's `usage` with the tokens of reasoning."""
    return usage_object(usage, sum(ended.reasoning_tokens for ended in endings))


class RunningUsage:
    """What a stream has used so far, for clients that want to know it with every chunk."""

    __slots__ = ("_choices", "_endings", "_num_choices", "_prompts")

    def __init__(self, num_choices: int) -> None:
        """Take the number of choices per prompt."""
        self._num_choices = max(1, num_choices)
        self._prompts: dict[int, TextOpened] = {}
        self._choices: dict[int, int] = {}
        self._endings: list[Ending] = []

    def opened(self, choice: int, prompt: TextOpened | None) -> None:
        """Take what a choice's prompt took: once for all choices, the least of them cached."""
        if prompt is None:
            return
        number = choice // self._num_choices
        known = self._prompts.get(number)
        if known is None or prompt.cached_tokens < known.cached_tokens:
            self._prompts[number] = prompt

    def grew(self, choice: int, num_tokens: int) -> None:
        """Take new tokens of a choice."""
        self._choices[choice] = self._choices.get(choice, 0) + num_tokens

    def ended(self, choice: int, ended: Ending) -> None:
        """Take the end of a choice, which knows best."""
        self._choices[choice] = ended.usage.completion_tokens
        self._endings.append(ended)

    def object(self) -> dict[str, Any]:
        """Build OpenAI's `usage` as of now."""
        prompts = self._prompts.values()
        usage = Usage(
            sum(prompt.prompt_tokens for prompt in prompts),
            sum(prompt.cached_tokens for prompt in prompts),
            sum(self._choices.values()),
        )
        return full_usage(usage, self._endings)
