"""The router's inbox: text for clients, answers to queries, refusals, heartbeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import AttemptId
from common.messages.arrays import Int32s, Int64s
from common.messages.columns import require_choices
from common.messages.control import WorkerAlive
from common.messages.failure import Failure, Usage
from common.messages.inspection import Inspection
from common.messages.timeline import TimelinePart
from common.messages.tokens import EndReason


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token that could have been chosen, with its logprob."""

    token_id: int
    text: str
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token with its logprob, and the most likely candidates, best first.

    `rank` is its place among all tokens, 1 for the most likely; 0 where it is not known.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a parsed answer.

    `content` and `reasoning` have new text. `call` begins tool call number `index` of the answer,
    with its `id` and the function's name as text; `arguments` has more of the JSON text of that
    call's arguments.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = 0
    id: str = ""


@dataclass(frozen=True, slots=True)
class TextOpened:
    """An attempt's first mail: what its prompt took; `prompt_ids` only where they were wanted."""

    row: int
    prompt_tokens: int
    cached_tokens: int
    prompt_ids: Int32s


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Logprobs of the prompt's tokens from position `first` on; position 0 has none."""

    row: int
    first: int
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextEnded:
    """The terminal of one attempt; `stop` is the stop string or stop token id that ended it.

    `num_calls` counts the tool calls of a parsed answer, `reasoning_tokens` those of its tokens
    that were reasoning. `embedding` is packed float32, the answer to a request with `pooling`.
    """

    row: int
    reason: EndReason
    usage: Usage
    stop: str | int | None = None
    failure: Failure | None = None
    num_calls: int = 0
    reasoning_tokens: int = 0
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class TextGenerated:
    """Detokenizer to router: new text of many attempts, one row each, as columns.

    Row r covers output ids `first_index[r] .. + num_tokens[r]` of attempt `counters[r]`; their ids
    are the next `num_tokens[r]` of `token_ids` and their text `texts[r]`, which may be empty while
    characters are held back. `logprobs` has an entry per row, empty where none were asked for.
    `parts` likewise: where an answer is parsed, its parts are what the client gets, and the text is
    what they were made of. Every row of such an answer has a part, if only an empty `content` one:
    no parts means that the text itself is for the client.
    """

    TAG: ClassVar[str] = "text_generated"
    counters: Int64s
    first_index: Int32s
    num_tokens: Int32s
    token_ids: Int32s
    texts: tuple[str, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    ended: tuple[TextEnded, ...] = ()
    parts: tuple[tuple[Part, ...], ...] = ()
    opened: tuple[TextOpened, ...] = ()
    scored: tuple[PromptScored, ...] = ()

    def merged(self, later: object) -> TextGenerated | None:
        """Join a later message to the same router into this one while both wait."""
        from common.messages import text_rows  # its builder makes this very class

        if not isinstance(later, TextGenerated):
            return None
        return text_rows.merged(self, later)

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree; called where mail is received."""
        from common.messages import text_rows

        text_rows.check(self)


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """Tokenizer to router: these attempts end before they reach compute."""

    TAG: ClassVar[str] = "attempt_refused"
    attempt: AttemptId
    num_choices: int
    failure: Failure

    def check(self) -> None:
        """Raise `MalformedMessage` unless the choices are countable."""
        require_choices(self.num_choices)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokenizer to router: the answer to a `TokenizeQuery`."""

    TAG: ClassVar[str] = "tokenized"
    query: AttemptId
    ids: Int32s
    token_strs: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Detokenizer to router: the answer to a `DetokenizeQuery`."""

    TAG: ClassVar[str] = "detokenized"
    query: AttemptId
    text: str
    failure: Failure | None = None


RouterInbox: TypeAlias = (
    TextGenerated
    | AttemptRefused
    | Tokenized
    | Detokenized
    | WorkerAlive
    | TimelinePart
    | Inspection
)
