"""The reception: requests wait here until their grammars can be used, and go on to the scheduler.

It knows neither mail nor processes; everything that ends requests has to pass here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.messages.address import AttemptId
from common.messages.failure import EndReason, Failure
from common.messages.sampling import Guidance
from services.compute.scheduler.door import MAX_CHOICES
from services.compute.scheduler.events import EventLog
from services.compute.scheduler.protocol import News, Request, Scheduler

Done = Callable[[Failure | None], None]


class Preparer(Protocol):
    """Makes guidance usable, in its own time."""

    def prepare(self, guidance: Guidance, done: Done) -> int:
        """Call `done` once, perhaps before this returns; gives a number to cancel it by."""
        ...

    def cancel(self, number: int) -> None:
        """Do not call it."""
        ...


@dataclass(slots=True, eq=False)
class _Held:
    request: Request
    number: int = 0
    gone: set[int] = field(default_factory=set)  # choices that have ended here


class Reception:
    """Holds guided requests while they are prepared; each choice still gets exactly one terminal.

    `tell` is given the terminals of requests that end here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        preparer: Preparer,
        max_held: int,
        tell: Callable[[list[News]], object],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._preparer = preparer
        self._max_held = max_held
        self._tell = tell
        self._clock = clock
        self._held: dict[AttemptId, tuple[_Held, int]] = {}  # with the number of the choice

    @property
    def num_held(self) -> int:
        """Attempts that are here."""
        return len(self._held)

    def add(self, request: Request, now_s: float) -> None:
        """Take a request: at once to the scheduler, or when its guidance has been prepared."""
        guidance = request.sampling.guidance
        if guidance is None or request.pooling or not 1 <= request.num_choices <= MAX_CHOICES:
            self._scheduler.add(request, now_s)
            return
        open_choices = {
            i for i in range(request.num_choices) if self._is_open(_attempt(request, i))
        }
        for part in _without(request, open_choices):
            self._hold(part, guidance)

    def abort(self, attempt: AttemptId, now_s: float) -> None:
        """End one attempt, here or there."""
        found = self._held.get(attempt)
        if found is None:
            self._scheduler.abort(attempt, now_s)
        else:
            self._end([found], "aborted", None)

    def end_all(self, matches: Callable[[Request], bool], reason: EndReason, now_s: float) -> None:
        """End every attempt of the requests that match, here and there."""
        self._end([f for f in self._held.values() if matches(f[0].request)], reason, None)
        self._scheduler.end_all(matches, reason, now_s)

    def open_attempts(self, router: str) -> list[int]:
        """Counters of a router's attempts, here and there."""
        here = [attempt.counter for attempt in self._held if attempt.router == router]
        return here + self._scheduler.open_attempts(router)

    def _is_open(self, attempt: AttemptId) -> bool:
        return attempt in self._held or self._scheduler.is_open(attempt)

    def _hold(self, request: Request, guidance: Guidance) -> None:
        held = _Held(request)
        if self._held and len(self._held) + request.num_choices > self._max_held:
            told = f"{len(self._held)} requests wait here for their grammars. Try again later."
            failure = Failure(503, "overloaded", told, retryable=True)
            choices = range(request.num_choices)
            self._end([(held, choice) for choice in choices], "refused", failure)
            return
        for choice in range(request.num_choices):
            self._held[_attempt(request, choice)] = held, choice
        held.number = self._preparer.prepare(guidance, lambda failure: self._done(held, failure))

    def _done(self, held: _Held, failure: Failure | None) -> None:
        if failure is not None:
            left = [c for c in range(held.request.num_choices) if c not in held.gone]
            self._end([(held, choice) for choice in left], "refused", failure)
            return
        for request in _without(held.request, held.gone):
            for choice in range(request.num_choices):
                del self._held[_attempt(request, choice)]
            self._scheduler.add(request, self._clock())
        self._tell([])

    def _end(
        self, ended: list[tuple[_Held, int]], reason: EndReason, failure: Failure | None
    ) -> None:
        log = EventLog()
        for held, choice in ended:
            attempt = _attempt(held.request, choice)
            held.gone.add(choice)
            self._held.pop(attempt, None)
            log.never_began(held.request, attempt, reason, failure)
            if len(held.gone) == held.request.num_choices and reason != "refused":
                self._preparer.cancel(held.number)
        if ended:
            self._tell(log.take())


def _attempt(request: Request, choice: int) -> AttemptId:
    return AttemptId(request.attempt.router, request.attempt.counter + choice)


def _without(request: Request, gone: set[int]) -> Iterator[Request]:
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
                attempt=_attempt(request, start),
                first_choice=request.first_choice + start,
                num_choices=choice - start + 1,
            )
            first = place
