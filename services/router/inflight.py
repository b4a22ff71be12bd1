"""The in-flight table: requests, their choices, and the attempts at each; pure and synchronous.

It keeps the journal of accepted ids that a retry on another worker needs, checks that rows continue
where the previous ones ended, and passes on exactly one end per choice. It knows neither HTTP nor
links: text goes to a `Sink`, and attempts that the stages must stop are returned as
`AbortedAttempt`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from common.messages.address import Route
from common.messages.arrays import int32s
from common.messages.control import AbortReason
from common.messages.failure import Ending, Failure
from common.messages.logprobs import Logprobs
from common.messages.text import AttemptRefused, TextGenerated
from services.router.answer import Sink
from services.router.request_stats import RequestStats

LOST = Failure(
    503, "stream_lost", "part of the answer was lost on its route; try again", None, True
)
WORKER_LOST = Failure(
    503, "worker_lost", "the server working on this request is gone; try again", None, True
)
MOVED = Failure(
    503, "worker_draining", "the server working on this request is stopping; try again", None, True
)
ABORTED = Failure(  # by a stage that took this router, or the stage after it, for gone
    503, "aborted", "the request was ended by the server; try again", None, True
)
FAILED = Failure(500, "internal_error", "the request failed in the server")

NEVER = -1.0
IN_TRANSIT_S = 0.5  # a heartbeat's interval


@dataclass(eq=False, slots=True)
class InflightRequest:
    """One request: its sink and its choices, `num_open` of which have not ended."""

    sink: Sink
    num_open: int
    stats: RequestStats
    admitted_at_s: float
    wants_ids: bool = False
    choices: list[Choice] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Choice:
    """One answer in progress, with the journal of its accepted tokens."""

    request: InflightRequest
    index: int
    attempts: list[Attempt] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=int32s)
    first_token_at_s: float = 0.0
    token_at_s: float = 0.0  # when its last token arrived; 0.0 before the first one
    opened: bool = False  # the sink has the prompt's token counts
    queued_s: float | None = None  # at compute, if known
    next_scored: int = 1  # position in the prompt


@dataclass(eq=False, slots=True)
class Attempt:
    """One try at a choice: its route, and the output index of its next row."""

    counter: int
    choice: Choice
    route: Route
    next_index: int
    seen_at_s: float  # admitted, or last listed by its tokenizer or compute
    left_at_s: float = 0.0  # since when neither lists it, as far as is known
    past_tokenizer: bool = False  # compute has it, as a row or a heartbeat said

    def needs(self, instance_id: str) -> bool:
        """Whether a worker is still involved; the tokenizer only until compute has the attempt."""
        route = self.route
        if instance_id in (route.compute.instance_id, route.detokenizer.instance_id):
            return True
        return route.tokenizer.instance_id == instance_id and not self.past_tokenizer


@dataclass(frozen=True, slots=True)
class AbortedAttempt:
    """An attempt that has left the table while stages may still work on it."""

    counter: int
    route: Route
    reason: AbortReason
    past_tokenizer: bool


class InflightTable:
    """Every open attempt of this router, by counter.

    Counters only grow: one below `next_counter` that is not open has ended, and its late rows are
    ignored. That needs no tombstones.
    """

    def __init__(self) -> None:
        self.next_counter = 0
        self.num_requests = 0
        self.stats: dict[str, RequestStats] = {}  # by model
        self._attempts: dict[int, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def num_at(self, instance_id: str) -> int:
        """Count the attempts that still involve a worker."""
        return sum(attempt.needs(instance_id) for attempt in self._attempts.values())

    def take_counters(self, count: int) -> int:
        """Reserve consecutive counters and return the first."""
        first = self.next_counter
        self.next_counter += count
        return first

    def open(self, sink: Sink, num_choices: int, model: str, now_s: float) -> InflightRequest:
        """Add a request for a model; its choices have no attempts yet."""
        self.num_requests += 1
        stats = self.stats.setdefault(model, RequestStats())
        request = InflightRequest(sink, num_choices, stats, now_s, sink.wants_ids)
        request.choices = [Choice(request, index) for index in range(num_choices)]
        return request

    def attempt(self, choices: Iterable[Choice], route: Route, now_s: float) -> list[Attempt]:
        """Start one attempt per choice, with consecutive counters, along one route."""
        chosen = list(choices)
        first = self.take_counters(len(chosen))
        started = []
        for counter, choice in enumerate(chosen, first):
            attempt = Attempt(counter, choice, route, len(choice.token_ids), now_s)
            choice.attempts.append(attempt)
            self._attempts[counter] = attempt
            started.append(attempt)
        return started

    def text(self, message: TextGenerated, now_s: float) -> list[AbortedAttempt]:
        """Pass rows to their sinks; an attempt with a gap is lost and fails its request."""
        aborted: list[AbortedAttempt] = []
        attempts = self._attempts
        token_ids, is_rich = message.token_ids, bool(message.logprobs or message.parts)
        logprobs = _by_row(message) if is_rich else ()
        self._prompts(message)
        end = 0
        # `num_rows` rows had their previous token at `previous_s`. That is nearly all of them, so a
        # step costs one observation instead of one per row.
        previous_s, num_rows, stats = NEVER, 0, None
        columns = zip(
            message.counters, message.first_index, message.num_tokens, message.texts, strict=True
        )
        for row, (counter, first, count, text) in enumerate(columns):
            start, end = end, end + count
            attempt = attempts.get(counter)
            if attempt is None:
                continue
            if first != attempt.next_index:
                if first + count > attempt.next_index:  # a row is missing; a repeated one is not
                    aborted += self._lose(attempt)
                continue
            choice = attempt.choice
            request = choice.request
            if count:
                if count == 1:
                    choice.token_ids.append(token_ids[start])
                else:
                    choice.token_ids.extend(token_ids[start:end])
                if choice.token_at_s == previous_s:
                    num_rows += 1
                else:
                    stats = request.stats
                    stats.inter_token_s.observe(now_s - previous_s, num_rows)
                    previous_s, num_rows = _previous_token(choice, now_s)
                choice.token_at_s = now_s
            attempt.next_index = first + count
            attempt.past_tokenizer = True
            if is_rich or request.wants_ids:
                request.sink.delta(
                    choice.index,
                    text,
                    logprobs[row] if logprobs else None,
                    message.parts[row] if message.parts else (),
                    token_ids[start:end] if request.wants_ids else (),
                )
            else:
                request.sink.delta(choice.index, text)
        if stats is not None:  # all rows are of one model, as they come from one detokenizer
            stats.inter_token_s.observe(now_s - previous_s, num_rows)
            stats.num_generated_tokens += len(token_ids)
        return aborted + self._endings(message, now_s)

    def refused(self, message: AttemptRefused) -> list[AbortedAttempt]:
        """Fail the request whose attempts the tokenizer refused."""
        aborted: list[AbortedAttempt] = []
        first = message.attempt.counter
        for counter in range(first, first + message.num_choices):
            attempt = self._attempts.pop(counter, None)
            if attempt is not None:
                attempt.choice.attempts.remove(attempt)
                aborted += self.fail(attempt.choice.request, message.failure)
        return aborted

    def close(
        self, request: InflightRequest, reason: AbortReason = "client_gone"
    ) -> list[AbortedAttempt]:
        """Remove a request, whatever its state; its sink gets nothing more."""
        request.stats.num_finished["abort"] += request.num_open
        return self._remove_request(request, reason)

    def fail(
        self, request: InflightRequest, failure: Failure, reason: AbortReason = "superseded"
    ) -> list[AbortedAttempt]:
        """End an open request with a failure."""
        if not request.num_open:
            return []
        if failure.status >= 500:
            request.stats.num_finished["error"] += request.num_open
        aborted = self._remove_request(request, reason)
        request.sink.failed(failure)
        return aborted

    def fail_all(self, failure: Failure) -> list[AbortedAttempt]:
        return self._fail_where(lambda attempt: True, failure)

    def lose_worker(self, instance_id: str, failure: Failure = WORKER_LOST) -> list[AbortedAttempt]:
        return self._fail_where(lambda attempt: attempt.needs(instance_id), failure)

    def listed(self, instance_id: str, counters: Collection[int], now_s: float) -> list[int]:
        """Note the attempts that a worker's heartbeat lists; return those not open here."""
        unknown = []
        for counter in counters:
            attempt = self._attempts.get(counter)
            if attempt is None:
                unknown.append(counter)
                continue
            route = attempt.route
            if instance_id == route.compute.instance_id:
                attempt.past_tokenizer = True
            elif instance_id != route.tokenizer.instance_id:
                continue  # a detokenizer cannot know that the last row was lost
            attempt.seen_at_s = now_s
            attempt.left_at_s = 0.0
        return unknown

    def fail_missing(
        self, beaten_since_s: Callable[[str], float], now_s: float
    ) -> list[AbortedAttempt]:
        """Fail the attempts that no stage has any more; call it a few times a second.

        `beaten_since_s(instance_id)` is the time of a worker's previous heartbeat sent with an
        empty inbox. If tokenizer and compute have sent two such heartbeats without listing the
        attempt, they have nothing more to send for it. If its end has not arrived after two more
        of the detokenizer, it is lost. Heartbeats within `IN_TRANSIT_S` of the last listing do not
        count: they may have been sent before it.
        """

        def missing(attempt: Attempt) -> bool:
            route, seen_at_s = attempt.route, attempt.seen_at_s + IN_TRANSIT_S
            for stage in (route.tokenizer, route.compute):
                if beaten_since_s(stage.instance_id) <= seen_at_s:
                    return False
            if not attempt.left_at_s:
                attempt.left_at_s = now_s
            return beaten_since_s(route.detokenizer.instance_id) > attempt.left_at_s

        return self._fail_where(missing, LOST, "lost")

    def _fail_where(
        self,
        concerned: Callable[[Attempt], bool],
        failure: Failure,
        reason: AbortReason = "superseded",
    ) -> list[AbortedAttempt]:
        aborted: list[AbortedAttempt] = []
        for attempt in list(filter(concerned, self._attempts.values())):
            aborted += self.fail(attempt.choice.request, failure, reason)
        return aborted

    def _endings(self, message: TextGenerated, now_s: float) -> list[AbortedAttempt]:
        aborted: list[AbortedAttempt] = []
        for row, ended in zip(message.ended_rows, message.ended, strict=True):
            attempt = self._attempts.get(message.counters[row])
            if attempt is not None:
                last = message.first_index[row] + message.num_tokens[row]
                aborted += self._end(attempt, ended, last, now_s)
        return aborted

    def _prompts(self, message: TextGenerated) -> None:
        """Pass on token counts and logprobs of prompts, each once per choice."""
        for opened in message.opened:
            attempt = self._attempts.get(message.counters[opened.row])
            if attempt is not None and not attempt.choice.opened:
                attempt.choice.opened = True
                attempt.choice.queued_s = opened.queued_s
                attempt.choice.request.stats.add_prompt(
                    opened.prompt_tokens, opened.cached_tokens, opened.queued_s
                )
                attempt.choice.request.sink.opened(attempt.choice.index, opened)
        for scored in message.scored:
            attempt = self._attempts.get(message.counters[scored.row])
            if attempt is not None and scored.first == attempt.choice.next_scored:
                attempt.choice.next_scored += len(scored.logprobs)
                attempt.choice.request.sink.scored(attempt.choice.index, scored)

    def _lose(self, attempt: Attempt) -> list[AbortedAttempt]:
        return self.fail(attempt.choice.request, LOST, "lost")

    def _end(
        self, attempt: Attempt, ended: Ending, last_index: int, now_s: float
    ) -> list[AbortedAttempt]:
        choice = attempt.choice
        request = choice.request
        if ended.reason not in ("stop", "length"):
            self._remove(attempt)  # it has ended and needs no Abort
            fallback = {"moved": MOVED, "aborted": ABORTED}.get(ended.reason, FAILED)
            return self.fail(request, ended.failure or fallback)
        if last_index != attempt.next_index:
            return self._lose(attempt)
        self._remove(attempt)
        aborted = self._drop_attempts(choice, "superseded")
        request.num_open -= 1
        if not request.num_open:
            self.num_requests -= 1
        decode_s = now_s - choice.first_token_at_s if choice.first_token_at_s else 0.0
        latency_s = now_s - request.admitted_at_s
        request.stats.add_finished(ended.reason, ended.usage, latency_s, decode_s)
        request.sink.finished(choice.index, ended)
        return aborted

    def _remove_request(
        self, request: InflightRequest, reason: AbortReason
    ) -> list[AbortedAttempt]:
        aborted = []
        for choice in request.choices:
            aborted += self._drop_attempts(choice, reason)
        if request.num_open:
            request.num_open = 0
            self.num_requests -= 1
        return aborted

    def _drop_attempts(self, choice: Choice, reason: AbortReason) -> list[AbortedAttempt]:
        aborted = []
        for attempt in choice.attempts:
            del self._attempts[attempt.counter]
            aborted.append(
                AbortedAttempt(attempt.counter, attempt.route, reason, attempt.past_tokenizer)
            )
        choice.attempts = []
        return aborted

    def _remove(self, attempt: Attempt) -> None:
        del self._attempts[attempt.counter]
        attempt.choice.attempts.remove(attempt)


def _previous_token(choice: Choice, now_s: float) -> tuple[float, int]:
    """Return when a choice's previous token arrived, and for how many choices that is known."""
    if choice.token_at_s:
        return choice.token_at_s, 1
    choice.first_token_at_s = now_s
    choice.request.stats.add_first_token(now_s - choice.request.admitted_at_s, choice.queued_s)
    return NEVER, 0


def _by_row(message: TextGenerated) -> Sequence[Logprobs | None]:
    """Return the logprobs of each row; nothing where no row has any."""
    if message.logprobs is None:
        return ()
    return [part if part.ids else None for part in message.logprobs.split(message.num_tokens)]
