"""The in-flight table: requests, their choices, and the attempts at each; pure and synchronous.

It keeps the journal (ids and characters accepted) that a retry on another worker needs, checks
that rows continue where the ones before ended, and lets exactly one terminal through per choice.
It knows neither HTTP nor links: what it finds goes to a `Sink`, and who must be told to stop is
returned as `Doomed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.address import Route
from common.messages.arrays import int32s
from common.messages.control import AbortReason
from common.messages.failure import Ending, Failure
from common.messages.text import (
    AttemptRefused,
    Part,
    PromptScored,
    TextGenerated,
    TextOpened,
    TokenLogprob,
)

LOST = Failure(503, "stream_lost", "part of the answer was lost on its way; try again", None, True)
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

IN_TRANSIT_S = 0.5  # a heartbeat's interval


class Sink(Protocol):
    """Where the text of one request goes; calls come in the order of the mail."""

    @property
    def wants_ids(self) -> bool:
        """Whether `delta` is to get the ids of the tokens, too; asked once."""
        ...

    def opened(self, choice: int, prompt: TextOpened) -> None:
        """Take what a choice's prompt took, before its first text."""
        ...

    def scored(self, choice: int, scored: PromptScored) -> None:
        """Take logprobs of a choice's prompt, those of one prompt in order."""
        ...

    def delta(
        self,
        choice: int,
        text: str,
        logprobs: tuple[TokenLogprob, ...] = (),
        parts: tuple[Part, ...] = (),
        token_ids: Sequence[int] = (),
    ) -> None:
        """Take new text of a choice, which may be empty; with parts they are what is shown."""
        ...

    def finished(self, choice: int, ended: Ending) -> None:
        """Take the end of a choice (`stop` or `length`); once per choice, the last call for it."""
        ...

    def failed(self, failure: Failure) -> None:
        """Take the failure of the whole request; at most once, the last call of all."""
        ...


class InflightRequest:
    """One request: its sink and its choices that have not ended."""

    __slots__ = ("num_open", "choices", "sink", "wants_ids")

    def __init__(self, sink: Sink, num_choices: int) -> None:
        self.sink = sink
        self.wants_ids = sink.wants_ids
        self.choices = [Choice(self, index) for index in range(num_choices)]
        self.num_open = num_choices


class Choice:
    """One answer in the making, with the journal of what was accepted for it."""

    __slots__ = (
        "attempts",
        "characters",
        "ended",
        "entry",
        "index",
        "next_scored",
        "opened",
        "token_ids",
    )

    def __init__(self, entry: InflightRequest, index: int) -> None:
        self.entry = entry
        self.index = index
        self.attempts: list[Attempt] = []
        self.token_ids: array[int] = int32s()
        self.characters = 0
        self.opened = False  # what its prompt took has been handed on
        self.next_scored = 1  # position of the prompt
        self.ended = False


class Attempt:
    """One try at a choice: where it runs, and which output index must come next."""

    __slots__ = (
        "choice",
        "counter",
        "route",
        "left_at_s",
        "next_index",
        "past_tokenizer",
        "seen_at_s",
    )

    def __init__(self, counter: int, choice: Choice, route: Route, now_s: float) -> None:
        self.counter = counter
        self.choice = choice
        self.route = route
        self.next_index = len(choice.token_ids)
        self.past_tokenizer = False  # compute has it, as a row or a heartbeat said
        self.seen_at_s = now_s  # admitted, or last listed by its tokenizer or compute
        self.left_at_s = 0.0  # since when neither lists it any more, as far as is known

    def needs(self, worker: str) -> bool:
        """Whether a worker (an instance) has still to do with it.

        A tokenizer has not once the attempt has reached compute.
        """
        way = self.route
        if worker in (way.compute.instance_id, way.detokenizer.instance_id):
            return True
        return way.tokenizer.instance_id == worker and not self.past_tokenizer


@dataclass(frozen=True, slots=True)
class AbortedAttempt:
    """An attempt that is out of the table while stages may still work on it."""

    counter: int
    route: Route
    reason: AbortReason
    past_tokenizer: bool


class InflightTable:
    """Every open attempt of this router, by counter.

    Counters only grow, so one below `next_counter` that is not open has ended: its late rows are
    passed over without keeping a list of the dead.
    """

    def __init__(self) -> None:
        self.next_counter = 0
        self.num_requests = 0
        self._attempts: dict[int, Attempt] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, counter: int) -> bool:
        return counter in self._attempts

    def num_at(self, worker: str) -> int:
        """Count the attempts that a worker (an instance) still has to do with."""
        return sum(attempt.needs(worker) for attempt in self._attempts.values())

    def take_counters(self, count: int) -> int:
        """Reserve consecutive counters and return the first."""
        first = self.next_counter
        self.next_counter += count
        return first

    def open(self, sink: Sink, num_choices: int) -> InflightRequest:
        """Enter a request; its choices have no attempts yet."""
        self.num_requests += 1
        return InflightRequest(sink, num_choices)

    def attempt(self, choices: Iterable[Choice], route: Route, now_s: float) -> list[Attempt]:
        """Start one attempt per choice, on consecutive counters, along one itinerary."""
        chosen = list(choices)
        first = self.take_counters(len(chosen))
        started = []
        for counter, choice in enumerate(chosen, first):
            attempt = Attempt(counter, choice, route, now_s)
            choice.attempts.append(attempt)
            self._attempts[counter] = attempt
            started.append(attempt)
        return started

    def text(self, message: TextGenerated) -> list[AbortedAttempt]:
        """Hand rows to their sinks; an attempt with a gap is lost and fails its request."""
        doomed: list[AbortedAttempt] = []
        attempts = self._attempts
        token_ids, logprobs, parts = message.token_ids, message.logprobs, message.parts
        if message.opened or message.scored:
            self._prompts(message)
        end = 0
        columns = zip(
            message.counters, message.first_index, message.num_tokens, message.texts, strict=True
        )
        for row, (counter, first, count, text) in enumerate(columns):
            start, end = end, end + count
            attempt = attempts.get(counter)
            if attempt is None:
                continue
            if first != attempt.next_index:
                if first + count > attempt.next_index:
                    doomed += self._lose(attempt)
                continue  # else: seen before
            choice = attempt.choice
            if count == 1:
                choice.token_ids.append(token_ids[start])
            elif count:
                choice.token_ids.extend(token_ids[start:end])
            attempt.next_index = first + count
            choice.characters += len(text)
            attempt.past_tokenizer = True
            entry = choice.entry
            if logprobs or parts or entry.wants_ids:
                entry.sink.delta(
                    choice.index,
                    text,
                    logprobs[row] if logprobs else (),
                    parts[row] if parts else (),
                    token_ids[start:end] if entry.wants_ids else (),
                )
            else:
                entry.sink.delta(choice.index, text)
        if message.ended:
            doomed += self._endings(message)
        return doomed

    def refused(self, message: AttemptRefused) -> list[AbortedAttempt]:
        """End attempts that the tokenizer refused; their request fails."""
        doomed: list[AbortedAttempt] = []
        first = message.attempt.counter
        for counter in range(first, first + message.num_choices):
            attempt = self._attempts.pop(counter, None)
            if attempt is not None:
                attempt.choice.attempts.remove(attempt)
                doomed += self.fail(attempt.choice.entry, message.failure)
        return doomed

    def close(
        self, entry: InflightRequest, reason: AbortReason = "client_gone"
    ) -> list[AbortedAttempt]:
        """Take a request out of the table, whatever its state; its sink hears nothing more."""
        doomed = []
        for choice in entry.choices:
            doomed += self._drop_attempts(choice, reason)
            choice.ended = True
        if entry.num_open:
            entry.num_open = 0
            self.num_requests -= 1
        return doomed

    def fail(
        self, entry: InflightRequest, failure: Failure, reason: AbortReason = "superseded"
    ) -> list[AbortedAttempt]:
        """End a request with a failure, once."""
        if not entry.num_open:
            return []
        doomed = self.close(entry, reason)
        entry.sink.failed(failure)
        return doomed

    def fail_all(self, failure: Failure) -> list[AbortedAttempt]:
        """End every request with a failure."""
        return self._fail_where(lambda attempt: True, failure)

    def lose_worker(self, instance_id: str, failure: Failure = WORKER_LOST) -> list[AbortedAttempt]:
        """End what a dead or hung worker was working on."""
        return self._fail_where(lambda attempt: attempt.needs(instance_id), failure)

    def listed(self, instance_id: str, counters: Collection[int], now_s: float) -> list[int]:
        """Note which attempts a worker says it has; return those that are not open here."""
        unknown = []
        for counter in counters:
            attempt = self._attempts.get(counter)
            if attempt is None:
                unknown.append(counter)
                continue
            way = attempt.route
            if instance_id == way.compute.instance_id:
                attempt.past_tokenizer = True
            elif instance_id != way.tokenizer.instance_id:
                continue  # a detokenizer cannot know that the terminal was lost
            attempt.seen_at_s = now_s
            attempt.left_at_s = 0.0
        return unknown

    def fail_missing(
        self, beaten_since_s: Callable[[str], float], now_s: float
    ) -> list[AbortedAttempt]:
        """End attempts of which nothing can come any more; call it a few times a second.

        `beaten_since_s(instance_id)` is when the last but one heartbeat of a worker came that had
        read all its mail. Tokenizer and compute have not listed such an attempt for two of those,
        so they have sent all that they will; after two more of the detokenizer its terminal would
        be here, were it not lost. Heartbeats within `IN_TRANSIT_S` of the last listing may have
        been on their way before it, or cross it between two stages.
        """

        def missing(attempt: Attempt) -> bool:
            way, seen_at_s = attempt.route, attempt.seen_at_s + IN_TRANSIT_S
            for stage in (way.tokenizer, way.compute):
                if beaten_since_s(stage.instance_id) <= seen_at_s:
                    return False
            if not attempt.left_at_s:
                attempt.left_at_s = now_s
            return beaten_since_s(way.detokenizer.instance_id) > attempt.left_at_s

        return self._fail_where(missing, LOST, "lost")

    def _fail_where(
        self,
        concerned: Callable[[Attempt], bool],
        failure: Failure,
        reason: AbortReason = "superseded",
    ) -> list[AbortedAttempt]:
        doomed: list[AbortedAttempt] = []
        for attempt in [each for each in self._attempts.values() if concerned(each)]:
            doomed += self.fail(attempt.choice.entry, failure, reason)
        return doomed

    def _endings(self, message: TextGenerated) -> list[AbortedAttempt]:
        doomed: list[AbortedAttempt] = []
        for row, ended in zip(message.ended_rows, message.ended, strict=True):
            attempt = self._attempts.get(message.counters[row])
            if attempt is not None:
                last = message.first_index[row] + message.num_tokens[row]
                doomed += self._end(attempt, ended, last)
        return doomed

    def _prompts(self, message: TextGenerated) -> None:
        """Hand on what is said of prompts; of an attempt that has said something, not again."""
        for opened in message.opened:
            attempt = self._attempts.get(message.counters[opened.row])
            if attempt is not None and not attempt.choice.opened:
                attempt.choice.opened = True
                attempt.choice.entry.sink.opened(attempt.choice.index, opened)
        for scored in message.scored:
            attempt = self._attempts.get(message.counters[scored.row])
            if attempt is not None and scored.first == attempt.choice.next_scored:
                attempt.choice.next_scored += len(scored.tokens)
                attempt.choice.entry.sink.scored(attempt.choice.index, scored)

    def _lose(self, attempt: Attempt) -> list[AbortedAttempt]:
        return self.fail(attempt.choice.entry, LOST, "lost")

    def _end(self, attempt: Attempt, ended: Ending, last_index: int) -> list[AbortedAttempt]:
        choice = attempt.choice
        entry = choice.entry
        if ended.reason in ("stop", "length"):
            if last_index != attempt.next_index:
                return self._lose(attempt)
            self._remove(attempt)
            doomed = self._drop_attempts(choice, "superseded")
            choice.ended = True
            entry.num_open -= 1
            if not entry.num_open:
                self.num_requests -= 1
            entry.sink.finished(choice.index, ended)
            return doomed
        self._remove(attempt)  # it has ended, so it needs no Abort
        fallback = {"moved": MOVED, "aborted": ABORTED}.get(ended.reason, FAILED)
        return self.fail(entry, ended.failure or fallback)

    def _drop_attempts(self, choice: Choice, reason: AbortReason) -> list[AbortedAttempt]:
        doomed = []
        for attempt in choice.attempts:
            del self._attempts[attempt.counter]
            doomed.append(
                AbortedAttempt(attempt.counter, attempt.route, reason, attempt.past_tokenizer)
            )
        choice.attempts = []
        return doomed

    def _remove(self, attempt: Attempt) -> None:
        del self._attempts[attempt.counter]
        attempt.choice.attempts.remove(attempt)
