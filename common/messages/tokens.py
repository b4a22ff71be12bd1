"""The detokenizer's inbox: tokens of one engine step, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import Address, AttemptId
from common.messages.arrays import Float32s, Int32s, Int64s
from common.messages.columns import require, require_columns
from common.messages.control import Abort, RouterAlive
from common.messages.failure import Failure, Usage
from common.messages.timeline import TimelineQuery

# stop: EOS, a stop token or a stop string; length: a limit; aborted: by the router or a stop
# string; failed: this request's fault or this engine's; refused: never started; moved: draining.
EndReason: TypeAlias = Literal["stop", "length", "aborted", "failed", "refused", "moved"]


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream header of a row whose attempt sends its first token in this message.

    The prompt's counts come along for the usage of a stream that a stop string ends.
    """

    row: int
    header: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of the prompt's tokens `ids`, which begin at position `first` of the prompt.

    `ranks` has each token's place among all, 1 for the most likely. Every token has `num_top`
    entries of `top_ids` and `top_logprobs`, best first.
    """

    row: int
    first: int
    num_top: int
    ids: Int32s
    ranks: Int32s
    logprobs: Float32s
    top_ids: Int32s
    top_logprobs: Float32s

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree."""
        require(self.first >= 1 and self.num_top >= 0, "prompt scores out of range")
        require_columns(self, ("ranks", "logprobs"), len(self.ids))
        require_columns(self, ("top_ids", "top_logprobs"), len(self.ids) * self.num_top)


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The terminal of a row's attempt; it repeats the header, should the first mail be lost.

    `embedding` is packed float32, the answer to a request with `pooling`.
    """

    row: int
    header: bytes
    reason: EndReason
    usage: Usage
    stop_token_id: int | None = None
    failure: Failure | None = None
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """Compute to detokenizer, once a step: the new tokens of all its attempts.

    Row r belongs to attempt (`routers[router_index[r]]`, `counters[r]`) and covers output indices
    `first_index[r] .. + num_tokens[r]`. Logprobs come only for rows with `num_top[r] >= 0`: one
    `chosen_logprobs` entry a token, and `num_top[r]` entries of `top_ids`/`top_logprobs` a token.
    """

    TAG: ClassVar[str] = "tokens_generated"
    step_id: int
    routers: tuple[str, ...]
    router_index: Int32s
    counters: Int64s
    first_index: Int32s
    num_tokens: Int32s
    token_ids: Int32s
    num_top: Int32s
    chosen_logprobs: Float32s
    top_ids: Int32s
    top_logprobs: Float32s
    opened: tuple[StreamOpened, ...] = ()
    ended: tuple[StreamEnded, ...] = ()
    scored: tuple[PromptScores, ...] = ()

    def merged(self, later: object) -> TokensGenerated | None:
        """Join a later message to the same detokenizer into this one while both wait."""
        from common.messages import token_merge  # which makes this very class

        if not isinstance(later, TokensGenerated):
            return None
        return token_merge.merged(self, later)

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree; called where mail is received."""
        from common.messages import token_rows

        token_rows.check(self)


@dataclass(frozen=True, slots=True)
class DetokenizeQuery:
    """Router to detokenizer: make text of these ids and send it back (`/detokenize`, echo).

    With `goes_on` it ends before a character that the ids leave unfinished: what comes behind it
    may bring the whole of it.
    """

    TAG: ClassVar[str] = "detokenize_query"
    query: AttemptId
    reply: Address
    ids: Int32s
    skip_special_tokens: bool = False
    traceparent: str = ""
    goes_on: bool = False


DetokenizerInbox: TypeAlias = (
    TokensGenerated | DetokenizeQuery | Abort | RouterAlive | TimelineQuery
)
