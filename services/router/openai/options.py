"""What an answer is to show beside its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The client's wishes for the shape of its answer, and the id that it gave its request.

    With `named_tool` the answer is one call that the client asked for by name, and ends by "stop",
    as OpenAI's does; with `functions` a call has the form of the time before tools. `echo` stands
    before the answer of a chat. With `prompt_alone` nothing was to be generated: what the ring had
    to make for the sake of the prompt's logprobs is not shown.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    include_reasoning: bool = True
    named_tool: bool = False
    functions: bool = False
    echo: str = ""
    given_id: str = ""
    prompt_alone: bool = False

    @property
    def needs_ids(self) -> bool:
        """Whether the ids of the tokens have to be known, to be shown or to be counted."""
        return self.token_ids or self.continuous_usage
