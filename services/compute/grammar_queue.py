"""The grammar queue: structured requests wait here until their grammars are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from common.messages.address import AttemptId
from common.messages.arrays import MAX_CHOICES
from common.messages.failure import EndReason, Failure
from common.messages.generate import Generate
from common.messages.sampling import GrammarSpec
from services.compute.grammar.manager import GrammarManager
from services.compute.scheduler.outputs import Output, attempt_of, never_started
from services.compute.scheduler.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Generate
    arrived_at_s: float
    number: int = 0  # to cancel its preparation by
    gone: set[int] = field(default_factory=set)  # choices that have ended here


class GrammarQueue:
    """Passes requests to the scheduler, structured ones when their grammars are ready.

    Aborts and queries of open attempts pass here, too: each choice gets exactly one terminal, here
    or there. `on_outputs` gets the terminals of requests that end here, and an empty list when a
    request has gone on to the scheduler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarManager,
        max_waiting: int,
        on_outputs: Callable[[list[Output]], object],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._on_outputs = on_outputs
        self._clock = clock
        self._waiting: dict[AttemptId, tuple[_Waiting, int]] = {}  # with the number of the choice

    def __len__(self) -> int:
        return len(self._waiting)

    def add_request(self, request: Generate, now_s: float) -> None:
        grammar_spec = request.sampling.grammar_spec
        if grammar_spec is None or request.pooling or not 1 <= request.num_choices <= MAX_CHOICES:
            self._scheduler.add_request(request, now_s)
            return
        choices = enumerate(attempt_of(request, i) for i in range(request.num_choices))
        open_choices = {i for i, a in choices if a in self._waiting or self._scheduler.is_open(a)}
        for part in _without(request, open_choices):
            self._prepare(part, grammar_spec)

    def abort(self, attempt: AttemptId, now_s: float) -> None:
        entry = self._waiting.get(attempt)
        if entry is None:
            self._scheduler.abort(attempt, now_s)
        else:
            self._end([entry], "aborted")

    def end_all(self, matches: Callable[[Generate], bool], reason: EndReason, now_s: float) -> None:
        self._end([e for e in self._waiting.values() if matches(e[0].request)], reason)
        self._scheduler.end_all(matches, reason, now_s)

    def open_attempts(self, router: str) -> list[int]:
        here = [attempt.counter for attempt in self._waiting if attempt.router == router]
        return here + self._scheduler.open_attempts(router)

    def _prepare(self, request: Generate, grammar_spec: GrammarSpec) -> None:
        entry, choices = _Waiting(request, self._clock()), range(request.num_choices)
        num_lacking = len(self._waiting) + request.num_choices - self._max_waiting
        if self._waiting and num_lacking > 0 and not request.output_ids:  # what goes on has a place
            message = (
                f"{len(self._waiting)} requests wait here for their grammars. Try again later."
            )
            failure = Failure(503, "overloaded", message, retryable=True)
            places = self._given_up(request, num_lacking)
            self._end(places or ((entry, choice) for choice in choices), "refused", failure)
            if not places:
                return
        for choice in choices:
            self._waiting[attempt_of(request, choice)] = entry, choice
        entry.number = self._grammars.prepare(
            grammar_spec,
            lambda failure: self._ready(entry, failure),
            request.client,
            goes_on=bool(request.output_ids),
        )

    def _given_up(self, request: Generate, num_lacking: int) -> list[tuple[_Waiting, int]]:
        """The latest of clients that keep more without them than this one will have, if they do;
        none of a request that a client reads already."""
        lines: dict[str, list[tuple[_Waiting, int]]] = {}
        num_own = request.num_choices
        for place in self._waiting.values():
            if place[0].request.client == request.client:
                num_own += 1
            elif not place[0].request.output_ids:
                lines.setdefault(place[0].request.client, []).append(place)
        places: list[tuple[_Waiting, int]] = []
        while len(places) < num_lacking:
            line = max(lines.values(), key=len, default=[])
            if len(line) <= num_own:
                return []
            places.append(line.pop())
        return places

    def _ready(self, entry: _Waiting, failure: Failure | None) -> None:
        if failure is not None:
            left = [c for c in range(entry.request.num_choices) if c not in entry.gone]
            self._end(((entry, choice) for choice in left), "refused", failure)
            return
        for request in _without(entry.request, entry.gone):
            for choice in range(request.num_choices):
                del self._waiting[attempt_of(request, choice)]
            # The wait for a grammar counts as time in the queue, as vLLM's does.
            self._scheduler.add_request(request, entry.arrived_at_s)
        self._on_outputs([])

    def _end(
        self,
        entries: Iterable[tuple[_Waiting, int]],
        reason: EndReason,
        failure: Failure | None = None,
    ) -> None:
        outputs: list[Output] = []
        for entry, choice in entries:
            attempt = attempt_of(entry.request, choice)
            entry.gone.add(choice)
            self._waiting.pop(attempt, None)
            outputs.append(never_started(entry.request, attempt, reason, failure))
            if len(entry.gone) == entry.request.num_choices:
                self._grammars.cancel(entry.number)
        if outputs:
            self._on_outputs(outputs)


def _without(request: Generate, gone: set[int]) -> Iterator[Generate]:
    """The rest of a request without some of its choices, in pieces that are requests again."""
    if not gone:
        yield request
        return
    left = [choice for choice in range(request.num_choices) if choice not in gone]
    first = 0
    for place, choice in enumerate(left, 1):
        if place == len(left) or left[place] != choice + 1:
            start = left[first]
            yield replace(
                request,
                attempt=attempt_of(request, start),
                first_choice=request.first_choice + start,
                num_choices=choice - start + 1,
            )
            first = place
