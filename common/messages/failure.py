"""How an attempt ends: why, what it used, and what went wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

# stop: EOS, a stop token or a stop string; length: a limit; aborted: by the router or a stop
# string; failed: this request's fault or this engine's; refused: never started; moved: draining.
EndReason: TypeAlias = Literal["stop", "length", "aborted", "failed", "refused", "moved"]


TOO_LONG: Final = "context_length_exceeded"  # the code of a prompt that does not fit


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or a failure of one attempt, ready to be shown to the client.

    `status` is the HTTP status, `code` a short stable word, `field` the request field at fault.
    Another replica may succeed where the failure is retryable. If the prompt is too long, the
    failure has its number of tokens, and the most that a prompt may have.
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
    """Tokens that one attempt used; `cached_tokens` of the prompt came from the prefix tree.

    Of the drafts that were computed, `accepted_tokens` are in the answer and `rejected_tokens` not.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one attempt; `stop` is the stop string or stop token id that ended it.

    `num_calls` counts the tool calls of a parsed answer, `reasoning_tokens` those of its tokens
    that were reasoning. `embedding` is packed float32, the answer to a request with `pooling`.
    """

    reason: EndReason
    usage: Usage
    stop: str | int | None = None
    failure: Failure | None = None
    num_calls: int = 0
    reasoning_tokens: int = 0
    embedding: bytes = b""
