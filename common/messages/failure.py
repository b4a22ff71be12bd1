"""What went wrong with a request, as it travels round the ring to the client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or a failure of one attempt, ready to be shown to the client.

    `status` is the HTTP status, `code` a short stable word, `field` the request field at fault.
    A retryable failure says: another replica may well succeed.
    """

    status: int
    code: str
    message: str
    field: str | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that one attempt used; `cached_tokens` of the prompt came from the prefix tree."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
