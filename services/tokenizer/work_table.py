"""The requests that this tokenizer has open, and the `Generate` messages that come of them."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.arrays import int64s
from common.messages.failure import Failure
from common.messages.generate import Generate, StreamHeader
from common.messages.sampling import SamplingParams
from common.messages.tokenize import Tokenize, TokenizeQuery
from services.tokenizer.jobs import Outcome

# A character is four bytes at most, so four byte tokens; twice that for a word they may end.
PROMPT_TAIL = 8
TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 1 << 16


@dataclass(slots=True, eq=False)
class Work:
    """One open request: its message, its size in bytes, and the counters of aborted attempts.

    A request with several choices is several attempts.
    """

    message: Tokenize | TokenizeQuery
    size: int
    job: int = 0
    began_s: float = 0.0
    aborted: set[int] = field(default_factory=set)

    @property
    def first(self) -> AttemptId:
        """Id of the request's first attempt, or of the query."""
        message = self.message
        return message.attempt if isinstance(message, Tokenize) else message.query

    @property
    def counters(self) -> range:
        message = self.message
        num_choices = message.num_choices if isinstance(message, Tokenize) else 1
        return range(self.first.counter, self.first.counter + num_choices)

    def live_runs(self) -> list[tuple[int, int]]:
        """Return (offset of the first choice, number of choices) of each run not aborted."""
        runs: list[tuple[int, int]] = []
        for offset, counter in enumerate(self.counters):
            if counter in self.aborted:
                continue
            if runs and runs[-1][0] + runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((offset, 1))
        return runs


class WorkTable:
    """Every open request, bounded in number and bytes, and the tombstones of early aborts."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._by_attempt: dict[AttemptId, Work] = {}
        self._work: dict[Work, None] = {}  # in the order of arrival
        self._tombstones: OrderedDict[AttemptId, float] = OrderedDict()  # until when
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._work)

    def refusal(self, size: int) -> Failure | None:
        """Return why a request of so many bytes cannot be accepted now; another replica may."""
        if len(self._work) < self._max_requests and self.num_bytes + size <= self._max_bytes:
            return None
        return Failure(
            status=503,
            code="overloaded",
            message="the tokenizer has as many prompts in work as it may; try again shortly",
            retryable=True,
        )

    def open(self, work: Work, now_s: float) -> bool:
        """Add a request; False when it is known already or was aborted before it arrived."""
        router = work.first.router
        attempts = [AttemptId(router, counter) for counter in work.counters]
        if any(attempt in self._by_attempt for attempt in attempts):
            return False
        for attempt in attempts:
            if self._tombstones.get(attempt, 0.0) > now_s:
                work.aborted.add(attempt.counter)
        if len(work.aborted) == len(attempts):
            return False
        for attempt in attempts:
            self._by_attempt[attempt] = work
        self._work[work] = None
        self.num_bytes += work.size
        return True

    def close(self, work: Work) -> None:
        """Remove a finished request; idempotent."""
        if work not in self._work:
            return
        del self._work[work]
        self.num_bytes -= work.size
        router = work.first.router
        for counter in work.counters:
            del self._by_attempt[AttemptId(router, counter)]

    def abort(self, attempt: AttemptId, now_s: float) -> Work | None:
        """End an attempt; return its request, now closed, if that was its last live attempt."""
        work = self._by_attempt.get(attempt)
        if work is None:
            self._bury(attempt, now_s)
            return None
        work.aborted.add(attempt.counter)
        if len(work.aborted) < len(work.counters):
            return None
        self.close(work)
        return work

    def lose_router(self, router: str) -> list[Work]:
        """Close and return every request of a router instance."""
        lost = [work for work in self._work if work.first.router == router]
        for work in lost:
            self.close(work)
        return lost

    def open_counters(self, router: str) -> array[int]:
        """Return the live attempts of a router, for its heartbeat; queries are not attempts."""
        return int64s(
            counter
            for work in self._work
            if work.first.router == router and isinstance(work.message, Tokenize)
            for counter in work.counters
            if counter not in work.aborted
        )

    def expire(self, now_s: float) -> None:
        """Drop expired tombstones."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now_s:
            self._tombstones.popitem(last=False)

    def _bury(self, attempt: AttemptId, now_s: float) -> None:
        self._tombstones.pop(attempt, None)  # to the end again, with its new time
        self._tombstones[attempt] = now_s + TOMBSTONE_S
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def generate_messages(
    work: Work, message: Tokenize, outcome: Outcome, sampling: SamplingParams, traceparent: str
) -> list[Generate]:
    """Make one `Generate` for each run of choices that were not aborted; mostly there is one."""
    header = pack(_header(message, outcome, sampling, traceparent))
    return [
        Generate(
            attempt=AttemptId(message.attempt.router, message.attempt.counter + offset),
            detokenizer=message.route.detokenizer,
            prompt_ids=outcome.ids.tobytes(),
            output_ids=message.output_ids,
            sampling=replace(sampling, grammar_spec=outcome.answer.grammar_spec),
            header=header,
            admitted_at_s=message.admitted_at_s,
            num_choices=num_choices,
            first_choice=message.first_choice + offset,
            priority=message.priority,
            cache_salt=message.cache_salt,
            traceparent=traceparent,
            pooling=message.pooling,
        )
        for offset, num_choices in work.live_runs()
    ]


def call_key(seed: int, admitted_at_s: float) -> str:
    """Derive the key of a request's tool call ids; a retry has the same seed and admission time."""
    return hashlib.blake2b(f"{seed} {admitted_at_s!r}".encode(), digest_size=12).hexdigest()


def _header(
    message: Tokenize, outcome: Outcome, sampling: SamplingParams, traceparent: str
) -> StreamHeader:
    stream, ids, answer = message.stream, outcome.ids, outcome.answer
    reasoning_format = answer.reasoning_format if stream.parse_reasoning else ""
    return StreamHeader(
        reply=message.route.reply,
        stop=stream.stop,
        include_stop_str_in_output=stream.include_stop_str_in_output,
        skip_special_tokens=stream.skip_special_tokens,
        num_logprobs=sampling.num_logprobs,
        min_tokens=sampling.min_tokens,
        prompt_tail_ids=tuple(ids[-PROMPT_TAIL:]),
        accepted_ids=tuple(message.output_ids),
        accepted_characters=message.accepted_characters,
        traceparent=traceparent,
        tool_format=answer.tool_format if stream.parse_tools else "",
        reasoning_format=reasoning_format,
        reasoning_open=bool(reasoning_format) and answer.reasoning_open,
        call_key=call_key(sampling.seed, message.admitted_at_s),
        first_counter=message.attempt.counter - message.first_choice,
        prompt_ids=ids.tobytes() if stream.return_prompt_ids else b"",
    )
