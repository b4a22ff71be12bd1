"""What went wrong with a request, as it travels round the ring to the client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or a failure of one attempt, ready to be shown to the client.

    `status` is the HTTP status, `code` a short stable word, `field` the request field at fault.
    A retryable failure says: another replica may well succeed. Of a prompt that is too long it has
    the tokens, and the most that the prompt may have.
    """

    status: int
    code: str
    message: str
    field: str | None = None
    retryable: bool = False
    prompt_tokens: int = 0
    most_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one attempt used; `cached_tokens` of the prompt came from the prefix tree."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
