"""The in-flight table: requests, their choices, and the attempts at each; pure and synchronous.

It keeps the journal of accepted ids that a retry on another worker needs, checks that rows continue
where the previous ones ended, and passes on exactly one end per choice. It knows neither HTTP nor
links: text goes to a `Sink`, attempts that the stages must stop are returned as `AbortedAttempt`,
and choices whose attempt ended by no fault of theirs are left in `displaced`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from common.messages.address import Route
from common.messages.control import AbortReason, ModelCard
from common.messages.failure import TOO_LONG, Ending, Failure
from common.messages.logprobs import Logprobs
from common.messages.text import AttemptRefused, TextGenerated
from services.router.answer import Sink
from services.router.attempts import (
    ABORTED,
    FAILED,
    LOST,
    MOVED,
    NEVER,
    WORKER_LOST,
    AbortedAttempt,
    Attempt,
    Choice,
    InflightRequest,
)
from services.router.breaker import CircuitBreakers
from services.router.caller import ANYBODY, TIMED_OUT, Caller
from services.router.drain_rate import DrainRate
from services.router.failover import Setback
from services.router.request_stats import RequestStats


class InflightTable:
    """Every open attempt of this router, by counter.

    Counters only grow: one below `next_counter` that is not open has ended, and its late rows are
    ignored. That needs no tombstones.
    """

    def __init__(self, breakers: CircuitBreakers | None = None) -> None:
        """Take the breakers that are told of answers that end well, and of those that fail."""
        self._breakers = breakers or CircuitBreakers()
        self.next_counter = 0
        self.requests: dict[InflightRequest, None] = {}  # those that are open
        self.stats: dict[str, RequestStats] = {}  # by model
        self.num_displaced = 0  # choices so far
        self.displaced: dict[Choice, None] = {}  # without an attempt, until they get another
        self.starts = DrainRate()  # of the choices without a token
        self._attempts: dict[int, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def num_at(self, instance_id: str) -> int:
        """Count the attempts that still involve a worker."""
        return sum(attempt.needs(instance_id) for attempt in self._attempts.values())

    def take_counters(self, count: int) -> int:
        """Reserve consecutive counters and return the first."""
        first = self.next_counter
        self.next_counter += count
        return first

    def open(
        self,
        sink: Sink,
        num_choices: int,
        card: ModelCard,
        now_s: float,
        caller: Caller = ANYBODY,
    ) -> InflightRequest:
        """Add a request for a model; its choices have no attempts yet."""
        stats = self.stats.setdefault(card.name, RequestStats())
        request = InflightRequest(sink, num_choices, stats, now_s, card, sink.wants_ids)
        request.caller, request.starts = caller, self.starts
        self.requests[request] = None
        request.choices = [Choice(request, index) for index in range(num_choices)]
        return request

    def attempt(self, choices: Iterable[Choice], route: Route, now_s: float) -> list[Attempt]:
        """Start one attempt per choice that has none, with consecutive counters, along a route."""
        chosen = list(choices)
        first = self.take_counters(len(chosen))
        started = []
        for counter, choice in enumerate(chosen, first):
            attempt = Attempt(counter, choice, route, len(choice.token_ids), now_s)
            choice.attempt = attempt
            self.displaced.pop(choice, None)
            self._attempts[counter] = attempt
            started.append(attempt)
        return started

    def attempt_of(self, counter: int) -> Attempt | None:
        return self._attempts.get(counter)

    def to_retry(self) -> list[list[Choice]]:
        """Return the displaced choices, the most advanced first; fresh ones of a prompt together.

        Those of one entry have consecutive numbers, so that one `Tokenize` asks for all of them.
        """
        fresh: dict[int, list[Choice]] = {}  # by prompt
        runs: list[list[Choice]] = []
        for choice in sorted(self.displaced, key=lambda one: (-len(one.token_ids), one.index)):
            prompt = id(choice.message)
            run = fresh.get(prompt)
            if choice.token_ids or run is None or run[-1].index + 1 != choice.index:
                run = []
                runs.append(run)
            run.append(choice)
            if not choice.token_ids:
                fresh[prompt] = run
        return runs

    def text(self, message: TextGenerated, now_s: float) -> list[AbortedAttempt]:
        """Pass rows to their sinks; an attempt with a gap is lost."""
        attempts = self._attempts
        token_ids, is_rich = message.token_ids, bool(message.logprobs or message.parts)
        logprobs = _by_row(message) if is_rich else ()
        aborted = self._prompts(message, now_s)
        end = num_ignored = 0
        # `num_rows` rows had their previous token at `previous_s`. That is nearly all of them, so a
        # step costs one observation instead of one per row.
        previous_s, num_rows, stats = NEVER, 0, None
        columns = zip(
            message.counters, message.first_index, message.num_tokens, message.texts, strict=True
        )
        for row, (counter, first, count, text) in enumerate(columns):
            start, end = end, end + count
            attempt = attempts.get(counter)
            if attempt is None or first != attempt.next_index:
                num_ignored += count
                if attempt and first + count > attempt.next_index:  # a row is missing, not repeated
                    aborted += self._lose(attempt, now_s)
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
                    choice.token_at_s = now_s
                else:
                    stats = request.stats
                    stats.inter_token_s.observe(now_s - previous_s, num_rows)
                    previous_s = choice.previous_token(now_s)
                    num_rows = int(previous_s != NEVER)
            choice.num_characters += len(text)
            attempt.next_index = first + count
            if not attempt.past_tokenizer:
                self._pass_tokenizer(attempt)
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
            stats.num_generated_tokens += len(token_ids) - num_ignored
        return aborted + self._endings(message, now_s)

    def refused(self, message: AttemptRefused, now_s: float) -> list[AbortedAttempt]:
        """Take attempts back that the tokenizer refused; another may take what is retryable."""
        aborted: list[AbortedAttempt] = []
        first = message.attempt.counter
        for counter in range(first, first + message.num_choices):
            attempt = self._attempts.get(counter)
            if attempt is not None:
                self._remove(attempt)
                # A prompt is too long for its compute; else the tokenizer cannot take it.
                is_long = message.failure.code == TOO_LONG
                by = (attempt.route.compute if is_long else attempt.route.tokenizer).instance_id
                aborted += self.displace(
                    attempt.choice, Setback(message.failure, refused_by=by), now_s
                )
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
        elif failure is TIMED_OUT:
            request.stats.num_finished["abort"] += request.num_open
        aborted = self._remove_request(request, reason)
        request.sink.failed(failure)
        return aborted

    def spent(self, now_s: float) -> list[tuple[InflightRequest, Failure]]:
        """Return the requests whose time is up, and why; call it at every tick."""
        return [(each, failure) for each in self.requests if (failure := each.spent(now_s))]

    def fail_all(self, failure: Failure) -> list[AbortedAttempt]:
        return [one for request in [*self.requests] for one in self.fail(request, failure)]

    def lose_worker(self, instance_id: str, now_s: float) -> list[AbortedAttempt]:
        """Displace the choices at a worker that is gone."""
        aborted: list[AbortedAttempt] = []
        for attempt in [each for each in self._attempts.values() if each.needs(instance_id)]:
            route = attempt.route
            compute = route.compute.instance_id
            if compute == instance_id:
                setback = Setback(WORKER_LOST, died_at="compute")
            else:
                at_text = route.detokenizer.instance_id == instance_id
                died_at = "detokenizer" if at_text else "tokenizer"
                setback = Setback(WORKER_LOST, died_at=died_at, kept_compute=compute)
            aborted += self.displace(attempt.choice, setback, now_s)
        return aborted

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
                if not attempt.past_tokenizer:
                    self._pass_tokenizer(attempt)
            elif instance_id != route.tokenizer.instance_id:
                continue  # a detokenizer cannot know that the last row was lost
            attempt.seen_at_s = now_s
            attempt.left_at_s = 0.0
        return unknown

    def lose_missing(
        self, beaten_since_s: Callable[[str], float], now_s: float
    ) -> list[AbortedAttempt]:
        """Give up the attempts that no stage has any more; call it a few times a second.

        `beaten_since_s(instance_id)` is the time of a worker's previous heartbeat sent with an
        empty inbox. If tokenizer and compute have sent two such heartbeats without listing the
        attempt, they have nothing more to send for it. If its end has not arrived after two more
        of the detokenizer, it is lost. Heartbeats within `IN_TRANSIT_S` of the last listing do not
        count: they may have been sent before it.
        """
        lost = [each for each in self._attempts.values() if each.is_missing(beaten_since_s, now_s)]
        return [aborted for attempt in lost for aborted in self._lose(attempt, now_s)]

    def _endings(self, message: TextGenerated, now_s: float) -> list[AbortedAttempt]:
        aborted: list[AbortedAttempt] = []
        for row, ended in zip(message.ended_rows, message.ended, strict=True):
            attempt = self._attempts.get(message.counters[row])
            if attempt is None:
                continue
            if ended.reason in ("stop", "length"):
                last = message.first_index[row] + message.num_tokens[row]
                aborted += self._end(attempt, ended, last, now_s)
            else:
                aborted += self._end_early(attempt, ended, now_s)
        return aborted

    def _pass_tokenizer(self, attempt: Attempt) -> None:
        attempt.past_tokenizer = True
        self._breakers.succeeded(attempt.route.tokenizer.endpoint)

    def _prompts(self, message: TextGenerated, now_s: float) -> list[AbortedAttempt]:
        """Pass on token counts and logprobs of prompts, each once per choice."""
        aborted: list[AbortedAttempt] = []
        for opened in message.opened:
            attempt = self._attempts.get(message.counters[opened.row])
            if attempt is not None and attempt.choice.opened is None:
                attempt.choice.opened = opened
                attempt.choice.request.stats.add_prompt(
                    opened.prompt_tokens, opened.cached_tokens, opened.queued_s
                )
                attempt.choice.request.sink.opened(attempt.choice.index, opened)
        for scored in message.scored:
            attempt = self._attempts.get(message.counters[scored.row])
            if attempt and scored.first > attempt.choice.next_scored:  # there is a gap
                aborted += self._lose(attempt, now_s)
            elif attempt:
                attempt.choice.score(scored)
        return aborted

    def _lose(self, attempt: Attempt, now_s: float) -> list[AbortedAttempt]:
        kept, lost_at = attempt.route.compute.instance_id, attempt.route.detokenizer.instance_id
        setback = Setback(LOST, kept_compute=kept, lost_at=lost_at)
        return self.displace(attempt.choice, setback, now_s, "lost")

    def displace(
        self, choice: Choice, setback: Setback, now_s: float, reason: AbortReason = "superseded"
    ) -> list[AbortedAttempt]:
        """End a choice's attempt, if it has one; it waits for another if it may, or else fails."""
        failure = setback.failure
        if not choice.request.num_open:
            return []  # another choice has just failed the request
        if failure.retryable:
            too_many = choice.setbacks.add(setback, len(choice.token_ids), now_s)
            if too_many is None:
                self.displaced[choice] = None
                self.num_displaced += 1
                return self._drop_attempt(choice, reason)
            failure = too_many
        return self.fail(choice.request, failure, reason)

    def _end(
        self, attempt: Attempt, ended: Ending, last_index: int, now_s: float
    ) -> list[AbortedAttempt]:
        choice = attempt.choice
        request = choice.request
        if last_index != attempt.next_index or choice.lacks_scores(ended.usage.prompt_tokens):
            return self._lose(attempt, now_s)
        if choice.setbacks.num_tries and choice.opened is not None:
            # What a retry finds of its own in a cache, the first try had computed.
            first = replace(ended.usage, cached_tokens=choice.opened.cached_tokens)
            ended = replace(ended, usage=first)
        self._remove(attempt)
        for station in (attempt.route.compute, attempt.route.detokenizer):
            self._breakers.succeeded(station.endpoint)
        request.num_open -= 1
        if not request.num_open:
            del self.requests[request]
        if not choice.first_token_at_s:
            self.starts.left(now_s)
        decode_s = now_s - choice.first_token_at_s if choice.first_token_at_s else 0.0
        latency_s = now_s - request.admitted_at_s
        reason: Literal["stop", "length"] = "stop" if ended.reason == "stop" else "length"
        request.stats.add_finished(reason, ended.usage, latency_s, decode_s)
        request.sink.finished(choice.index, ended)
        return []

    def _end_early(self, attempt: Attempt, ended: Ending, now_s: float) -> list[AbortedAttempt]:
        compute = attempt.route.compute.instance_id
        fallback = {"moved": MOVED, "aborted": ABORTED}.get(ended.reason, FAILED)
        failure = ended.failure or fallback
        if ended.reason == "failed" and failure.status == 500:
            self._breakers.failed(attempt.route.compute.endpoint, now_s, failure.code)
            self._remove(attempt)
            setback = Setback(failure, died_at="compute", wrong_at=compute)
            return self.displace(attempt.choice, setback, now_s)
        if ended.reason == "refused" or not failure.retryable:
            self._remove(attempt)  # it has ended at compute and needs no Abort
            return self.displace(attempt.choice, Setback(failure, refused_by=compute), now_s)
        # Perhaps only the detokenizer's part has ended.
        return self.displace(attempt.choice, Setback(failure, kept_compute=compute), now_s)

    def _remove_request(
        self, request: InflightRequest, reason: AbortReason
    ) -> list[AbortedAttempt]:
        aborted = []
        for choice in request.choices:
            self.displaced.pop(choice, None)
            aborted += self._drop_attempt(choice, reason)
        if request.num_open:
            request.num_open = 0
            del self.requests[request]
        return aborted

    def _drop_attempt(self, choice: Choice, reason: AbortReason) -> list[AbortedAttempt]:
        attempt = choice.attempt
        if attempt is None:
            return []
        self._remove(attempt)
        return [AbortedAttempt(attempt.counter, attempt.route, reason, attempt.past_tokenizer)]

    def _remove(self, attempt: Attempt) -> None:
        del self._attempts[attempt.counter]
        attempt.choice.attempt = None


def _by_row(message: TextGenerated) -> Sequence[Logprobs | None]:
    """Return the logprobs of each row; nothing where no row has any."""
    if message.logprobs is None:
        return ()
    return [part if part.ids else None for part in message.logprobs.split(message.num_tokens)]
