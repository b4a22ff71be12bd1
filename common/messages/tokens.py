"""The detokenizer's inbox: the tokens of one engine step, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, TypeAlias

from common.messages.address import Address, AttemptId
from common.messages.arrays import (
    Int32s,
    Uint32s,
    Uint64s,
    int32s,
    require,
    require_attempts,
    require_columns,
    require_rows,
    uint32s,
    uint64s,
)
from common.messages.control import Abort, RouterAlive
from common.messages.failure import Ending
from common.messages.logprobs import Logprobs, PromptLogprobs, absent, joined
from common.messages.queries import TimelineQuery

_FIRST_ROUTER = uint32s((0,))
_ONE_TOKEN = uint32s((1,))


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream header of a row whose attempt sends its first token in this message.

    The prompt's counts come along for the usage of a stream that a stop string ends. `queued_s` is
    how long the attempt waited at compute before it first ran, None if it never did.
    """

    row: int
    header: bytes
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float | None = None


class TokenLogprobs(NamedTuple):
    """Logprobs of one sampled token: its own, and the most likely ids with theirs, best first.

    They are of the raw model distribution, before temperature, penalties and cuts (as vLLM's).
    """

    chosen: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenRow(NamedTuple):
    """New tokens of one attempt: output indices `first_index .. + len(token_ids)`.

    `logprobs` is None where none were asked for. `opened` comes with an attempt's first row,
    `ended` with its last; either brings the packed stream `header`. `scored` are logprobs of its
    prompt. `drafted` says how many drafts were accepted and rejected up to its last token, if there
    were more.
    """

    router: str
    counter: int
    first_index: int
    token_ids: array[int]
    logprobs: Logprobs | None = None
    opened: StreamOpened | None = None
    ended: Ending | None = None
    header: bytes = b""
    scored: tuple[PromptLogprobs, ...] = ()
    drafted: tuple[int, int] | None = None

    @property
    def attempt(self) -> AttemptId:
        return AttemptId(self.router, self.counter)


_Extras: TypeAlias = tuple[
    Logprobs | None, StreamOpened | None, Ending | None, bytes, tuple[PromptLogprobs, ...]
]

_NO_EXTRAS: _Extras = (None, None, None, b"", ())


@dataclass(slots=True)
class TokensGenerated:
    """Compute to detokenizer, once a step: the new tokens of all its attempts.

    Row r belongs to attempt (`routers[router_index[r]]`, `counters[r]`) and covers output indices
    `first_index[r] .. + num_tokens[r]`. `logprobs` are those of all tokens, or None where no row
    has any. Row `ended_rows[i]` is the last of its attempt: it has the i-th ending, and repeats the
    stream header in case the attempt's first message was lost. Up to row `drafted_rows[i]` so many
    drafts of its attempt were accepted, and rejected: for the usage of a stream that a stop string
    ends.
    """

    TAG: ClassVar[str] = "tokens_generated"
    step_id: int
    routers: list[str] = field(default_factory=list)
    router_index: Uint32s = field(default_factory=uint32s)
    counters: Uint64s = field(default_factory=uint64s)
    first_index: Uint32s = field(default_factory=uint32s)
    num_tokens: Uint32s = field(default_factory=uint32s)
    token_ids: Int32s = field(default_factory=int32s)
    logprobs: Logprobs | None = None
    opened: list[StreamOpened] = field(default_factory=list)
    ended_rows: Uint32s = field(default_factory=uint32s)
    ended: list[Ending] = field(default_factory=list)
    ended_headers: list[bytes] = field(default_factory=list)
    num_steps: int = 1  # that were merged into this message
    scored: list[PromptLogprobs] = field(default_factory=list)
    drafted_rows: Uint32s = field(default_factory=uint32s)
    num_accepted: Uint32s = field(default_factory=uint32s)
    num_rejected: Uint32s = field(default_factory=uint32s)

    def add(
        self,
        attempt: AttemptId,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        header: bytes | None = None,
        prompt: tuple[int, int, float | None] = (0, 0, None),
    ) -> None:
        """Add a row; `logprobs` go with every token, `header` with an attempt's first row.

        `prompt` goes with the header: the prompt's tokens, the cached ones among them, the time
        in the queue.
        """
        if logprobs and len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} logprob entries for {len(token_ids)} tokens")
        if header is not None:
            self.opened.append(StreamOpened(len(self.counters), header, *prompt))
        if logprobs and self.logprobs is None:
            self.logprobs = absent(len(self.token_ids))
        if self.logprobs is not None:
            for token_id, scores in zip(token_ids, logprobs, strict=False):
                ids, values = (token_id, *scores.top_ids), (scores.chosen, *scores.top_logprobs)
                self.logprobs.add(ids, values)
            if not logprobs:
                self.logprobs.extend(absent(len(token_ids)))
        self.router_index.append(self._router(attempt.router))
        self.counters.append(attempt.counter)
        self.first_index.append(first_index)
        self.num_tokens.append(len(token_ids))
        self.token_ids.extend(token_ids)

    def extend(
        self,
        router: str,
        counters: bytes | memoryview,
        first_index: bytes | memoryview,
        token_ids: bytes | memoryview,
    ) -> None:
        """Add rows of one token each with nothing else to say, of attempts of one router.

        The columns are packed as in memory: 64-bit counters, 32-bit indices and ids.
        """
        num_before = len(self.counters)
        self.counters.frombytes(counters)
        num_rows = len(self.counters) - num_before
        number = self._router(router)
        self.router_index += (uint32s((number,)) if number else _FIRST_ROUTER) * num_rows
        self.first_index.frombytes(first_index)
        self.num_tokens += _ONE_TOKEN * num_rows
        self.token_ids.frombytes(token_ids)
        if self.logprobs is not None:
            self.logprobs.extend(absent(num_rows))

    def end(self, header: bytes, ending: Ending) -> None:
        """Make the row added last the end of its attempt; such a row may have no tokens."""
        self.ended_rows.append(len(self.counters) - 1)
        self.ended.append(ending)
        self.ended_headers.append(header)

    def score(self, scored: PromptLogprobs) -> None:
        """Give the row added last logprobs of its prompt; `scored.row` is filled in."""
        self.scored.append(replace(scored, row=len(self.counters) - 1))

    def draft(self, num_accepted: int, num_rejected: int) -> None:
        """Give the row added last what became of its attempt's drafts."""
        self.drafted_rows.append(len(self.counters) - 1)
        self.num_accepted.append(num_accepted)
        self.num_rejected.append(num_rejected)

    def rows(self) -> Iterator[TokenRow]:
        """Read row by row, in order."""
        ids, routers = self.token_ids, self.routers
        extras, drafted = self._extras(), self._drafted()
        columns = zip(
            self.router_index, self.counters, self.first_index, self.num_tokens, strict=True
        )
        end = 0
        for row, (router, counter, first_index, count) in enumerate(columns):
            start, end = end, end + count
            tokens = ids[start:end]
            if row in extras or row in drafted:
                more, counts = extras.get(row, _NO_EXTRAS), drafted.get(row)
                yield TokenRow(routers[router], counter, first_index, tokens, *more, counts)
            else:
                yield TokenRow(routers[router], counter, first_index, tokens)

    def runs(self) -> Iterator[TokenRow]:
        """Read the same with one row for rows that continue one another.

        Rows of one attempt stay in order. A stream takes further tokens of a row in a fifth of the
        time that a row takes.
        """
        if self.num_steps == 1:
            yield from self.rows()
            return
        ids, routers = self.token_ids, self.routers
        extras, drafted = self._extras(), self._drafted()
        latest: dict[tuple[int, int], tuple[int, int]] = {}  # of drafts
        runs: dict[tuple[int, int], tuple[int, array[int]]] = {}
        columns = zip(
            self.router_index, self.counters, self.first_index, self.num_tokens, strict=True
        )
        end = 0
        for row, (router, counter, first_index, count) in enumerate(columns):
            start, end = end, end + count
            tokens = ids[start:end]
            key = (router, counter)
            if row in drafted:
                latest[key] = drafted[row]
            run = runs.get(key)
            if run is not None:
                if row not in extras and run[0] + len(run[1]) == first_index:
                    run[1].extend(tokens)
                    continue
                del runs[key]
                yield TokenRow(routers[router], counter, *run)
            if row in extras:
                more, counts = extras[row], latest.pop(key, None)
                yield TokenRow(routers[router], counter, first_index, tokens, *more, counts)
            else:
                runs[key] = (first_index, tokens)
        for (router, counter), run in runs.items():
            counts = latest.get((router, counter))
            yield TokenRow(routers[router], counter, *run, drafted=counts)

    def merged(self, later: object) -> TokensGenerated | None:
        """Join a later message to the same detokenizer to this one while both wait.

        The rows of both, one behind the other: an attempt may have several.
        """
        if not isinstance(later, TokensGenerated):
            return None
        before = len(self.counters)
        routers = list(dict.fromkeys((*self.routers, *later.routers)))
        router_index = later.router_index
        if routers[: len(later.routers)] != later.routers:
            numbers = [routers.index(router) for router in later.routers]
            router_index = uint32s([numbers[index] for index in router_index])
        return TokensGenerated(
            step_id=later.step_id,
            routers=routers,
            router_index=self.router_index + router_index,
            counters=self.counters + later.counters,
            first_index=self.first_index + later.first_index,
            num_tokens=self.num_tokens + later.num_tokens,
            token_ids=self.token_ids + later.token_ids,
            logprobs=joined(
                self.logprobs, len(self.token_ids), later.logprobs, len(later.token_ids)
            ),
            opened=self.opened + [replace(o, row=before + o.row) for o in later.opened],
            ended_rows=self.ended_rows + uint32s([before + row for row in later.ended_rows]),
            ended=self.ended + later.ended,
            ended_headers=self.ended_headers + later.ended_headers,
            num_steps=self.num_steps + later.num_steps,
            scored=self.scored + [replace(s, row=before + s.row) for s in later.scored],
            drafted_rows=self.drafted_rows + uint32s([before + row for row in later.drafted_rows]),
            num_accepted=self.num_accepted + later.num_accepted,
            num_rejected=self.num_rejected + later.num_rejected,
        )

    def check(self) -> None:
        """Raise `MalformedMessage` unless the columns agree; the codec calls it."""
        num_rows = len(self.counters)
        require_columns(self, ("router_index", "first_index", "num_tokens"), num_rows)
        require_attempts(self.counters, self.first_index, self.num_tokens, len(self.token_ids))
        if self.router_index != _FIRST_ROUTER * num_rows or not self.routers:
            require(
                max(self.router_index, default=-1) < len(self.routers),
                "router_index without a router",
            )
        if self.logprobs is not None:
            self.logprobs.check_rows(self.num_tokens)
        require_rows("opened", [opened.row for opened in self.opened], num_rows)
        require_rows("ended", self.ended_rows, num_rows)
        require_columns(self, ("ended", "ended_headers"), len(self.ended_rows))
        require_rows("drafted", self.drafted_rows, num_rows)
        require_columns(self, ("num_accepted", "num_rejected"), len(self.drafted_rows))
        require_rows("scored", {scores.row for scores in self.scored}, num_rows)

    def _router(self, router: str) -> int:
        if router not in self.routers:
            self.routers.append(router)
        return self.routers.index(router)

    def _drafted(self) -> dict[int, tuple[int, int]]:
        """What became of drafts, by rows."""
        counts = zip(self.num_accepted, self.num_rejected, strict=True)
        return dict(zip(self.drafted_rows, counts, strict=True))

    def _extras(self) -> dict[int, _Extras]:
        """Return what rows have beside their tokens, as the further fields of a `TokenRow`."""
        if not (self.opened or self.ended or self.scored or self.logprobs):
            return {}
        openings = {opened.row: opened for opened in self.opened}
        columns = zip(self.ended_rows, self.ended, self.ended_headers, strict=True)
        endings = {row: (ending, header) for row, ending, header in columns}
        scored: dict[int, tuple[PromptLogprobs, ...]] = {}
        for prompt in self.scored:
            scored[prompt.row] = (*scored.get(prompt.row, ()), prompt)
        pieces = () if self.logprobs is None else self.logprobs.split(self.num_tokens)
        logprobs = {row: piece for row, piece in enumerate(pieces) if piece.ids}
        extras: dict[int, _Extras] = {}
        for row in {*openings, *endings, *scored, *logprobs}:
            opened = openings.get(row)
            ending, header = endings.get(row, (None, b""))
            if opened is not None:
                header = opened.header
            extras[row] = (logprobs.get(row), opened, ending, header, scored.get(row, ()))
        return extras


@dataclass(frozen=True, slots=True)
class DetokenizeQuery:
    """Router to detokenizer: make text of these ids and send it back (`/detokenize`, echo).

    With `goes_on` the text ends before a character that the ids leave unfinished: the ids that
    follow may complete it. The ids are below `vocab_size`; 0 means the detokenizer's own.
    """

    TAG: ClassVar[str] = "detokenize_query"
    query: AttemptId
    reply: Address
    ids: Int32s
    skip_special_tokens: bool = False
    traceparent: str = ""
    goes_on: bool = False
    vocab_size: int = 0


DetokenizerInbox: TypeAlias = (
    TokensGenerated | DetokenizeQuery | Abort | RouterAlive | TimelineQuery
)
