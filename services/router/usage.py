"""The usage of one response, gathered from its choices' terminals."""

from __future__ import annotations

from common.messages.failure import Usage


class UsageTally:
    """Adds up tokens: a prompt counts once, however many choices continue it."""

    __slots__ = ("_completion", "_num_choices", "_prompts")

    def __init__(self, num_choices: int) -> None:
        """Take the number of choices per prompt."""
        self._num_choices = num_choices
        self._prompts: dict[int, Usage] = {}
        self._completion = 0

    def add(self, choice: int, usage: Usage) -> None:
        """Take the usage of one choice of the response."""
        prompt = choice // self._num_choices
        known = self._prompts.get(prompt)
        # Later choices find the prompt cached by the first one; what counts is the least.
        if known is None or usage.cached_tokens < known.cached_tokens:
            self._prompts[prompt] = usage
        self._completion += usage.completion_tokens

    def total(self) -> Usage:
        """Return the usage of the response so far."""
        prompts = self._prompts.values()
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            completion_tokens=self._completion,
        )
