"""The router's inbox: text for clients, answers to queries, refusals, heartbeats."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from common.messages.address import AttemptId
from common.messages.arrays import (
    Int32s,
    Uint32s,
    Uint64s,
    int32s,
    require_attempts,
    require_choices,
    require_columns,
    require_rows,
    uint32s,
    uint64s,
)
from common.messages.control import WorkerAlive
from common.messages.failure import Ending, Failure
from common.messages.logprobs import Logprobs, PromptLogprobs, absent, joined
from common.messages.queries import Inspection, TimelinePart


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
    """The prompt's token counts, with an attempt's first row, and its ids where they are wanted.

    `queued_s` is how long the attempt waited at compute before it first ran, None if not known.
    """

    row: int
    prompt_tokens: int
    cached_tokens: int
    prompt_ids: Int32s
    queued_s: float | None = None


@dataclass(slots=True)
class TextGenerated:
    """Detokenizer to router: new text of many attempts, one row each, as columns.

    Row r covers output ids `first_index[r] .. + num_tokens[r]` of attempt `counters[r]`; their ids
    are the next `num_tokens[r]` of `token_ids` and their text `texts[r]`, which may be empty while
    characters are held back. `logprobs` are those of all tokens, or None where no row has any.
    `parts` has an entry per row, or none at all: the parts of a parsed answer are what the client
    gets, and the text is what they were made of. Every row of such an answer has a part, if only an
    empty `content` one: no parts means that the text itself is for the client. Row `ended_rows[i]`
    is the last of its attempt and has the i-th ending.
    """

    TAG: ClassVar[str] = "text_generated"
    counters: Uint64s = field(default_factory=uint64s)
    first_index: Uint32s = field(default_factory=uint32s)
    num_tokens: Uint32s = field(default_factory=uint32s)
    token_ids: Int32s = field(default_factory=int32s)
    texts: list[str] = field(default_factory=list)
    logprobs: Logprobs | None = None
    ended_rows: Uint32s = field(default_factory=uint32s)
    ended: list[Ending] = field(default_factory=list)
    parts: list[tuple[Part, ...]] = field(default_factory=list)
    opened: list[TextOpened] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)

    def add(
        self,
        counter: int,
        first_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Logprobs | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        """Add a row: `text` covers `token_ids`, which start at output index `first_index`."""
        if logprobs is not None or self.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = absent(len(self.token_ids))
            self.logprobs.extend(logprobs or absent(len(token_ids)))
        self.counters.append(counter)
        self.first_index.append(first_index)
        self.num_tokens.append(len(token_ids))
        self.token_ids.extend(token_ids)
        self.texts.append(text)
        if parts or self.parts:
            self.parts += [()] * (len(self.texts) - 1 - len(self.parts))
            self.parts.append(parts)

    def open(
        self,
        prompt_tokens: int,
        cached_tokens: int,
        prompt_ids: array[int],
        queued_s: float | None = None,
    ) -> None:
        """Make the row added last the first of its attempt."""
        row = len(self.counters) - 1
        self.opened.append(TextOpened(row, prompt_tokens, cached_tokens, prompt_ids, queued_s))

    def score(self, first: int, logprobs: Logprobs) -> None:
        """Give the row added last logprobs of its prompt, from position `first` on."""
        self.scored.append(PromptLogprobs(len(self.counters) - 1, first, logprobs))

    def end(self, ending: Ending) -> None:
        """Make the row added last the end of its attempt; such a row may be empty."""
        self.ended_rows.append(len(self.counters) - 1)
        self.ended.append(ending)

    def merged(self, later: object) -> TextGenerated | None:
        """Join a later message to the same router to this one while both wait.

        The rows of both, one behind the other: an attempt may have several.
        """
        if not isinstance(later, TextGenerated):
            return None
        before = len(self.counters)
        return TextGenerated(
            counters=self.counters + later.counters,
            first_index=self.first_index + later.first_index,
            num_tokens=self.num_tokens + later.num_tokens,
            token_ids=self.token_ids + later.token_ids,
            texts=self.texts + later.texts,
            logprobs=joined(
                self.logprobs, len(self.token_ids), later.logprobs, len(later.token_ids)
            ),
            ended_rows=self.ended_rows + uint32s([before + row for row in later.ended_rows]),
            ended=self.ended + later.ended,
            parts=_joined_parts(self.parts, before, later.parts, len(later.counters)),
            opened=self.opened + [replace(o, row=before + o.row) for o in later.opened],
            scored=self.scored + [replace(s, row=before + s.row) for s in later.scored],
        )

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree; the codec calls it."""
        num_rows = len(self.counters)
        require_columns(self, ("first_index", "num_tokens", "texts"), num_rows)
        require_attempts(self.counters, self.first_index, self.num_tokens, len(self.token_ids))
        if self.logprobs is not None:
            self.logprobs.check_rows(self.num_tokens)
            self.logprobs.check_names()
        if self.parts:
            require_columns(self, ("parts",), num_rows)
        require_rows("ended", self.ended_rows, num_rows)
        require_columns(self, ("ended",), len(self.ended_rows))
        require_rows("opened", [opened.row for opened in self.opened], num_rows)
        require_rows("scored", {scored.row for scored in self.scored}, num_rows)
        for scored in self.scored:
            scored.logprobs.check_names()


def _joined_parts(
    earlier: list[tuple[Part, ...]], num_earlier: int, later: list[tuple[Part, ...]], num_later: int
) -> list[tuple[Part, ...]]:
    """Join two columns of which either may be missing."""
    if not earlier and not later:
        return []
    return (earlier or [()] * num_earlier) + (later or [()] * num_later)


@dataclass(frozen=True, slots=True)
class AttemptRefused:
    """Tokenizer to router: these attempts end before they reach compute."""

    TAG: ClassVar[str] = "attempt_refused"
    attempt: AttemptId
    num_choices: int
    failure: Failure

    def check(self) -> None:
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
