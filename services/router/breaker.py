"""Replicas that fail again and again are left alone for a while; pure, given the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_FAILURES = 3  # one after the other, with no success between them
INSTANT_S = 0.1  # the rows of one broken step, or the choices of a request, are one failure
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
FORGET_S = 300.0  # after the last failure; longer than any pause
MAX_REPLICAS = 1024  # remembered with failures; of more, the oldest are forgotten


@dataclass(slots=True)
class CircuitBreaker:
    """The failures of one replica since its last success, and until when it is left alone.

    Closed below `MAX_FAILURES`; then open for a pause; half open after it: one request is let in as
    a trial, and decides. The pause doubles with every trial that fails.
    """

    num_failures: int = 0
    failed_at_s: float = -math.inf
    open_until_s: float = 0.0
    is_tried: bool = False
    why: str = ""  # it failed the last time

    @property
    def is_closed(self) -> bool:
        return self.num_failures < MAX_FAILURES

    def fail(self, now_s: float, why: str) -> None:
        """Count a failure; of several at an instant, or of what it had left, only the reason."""
        is_new = now_s - self.failed_at_s >= INSTANT_S if self.is_closed else self.is_tried
        self.why = why
        if is_new:
            self.failed_at_s = now_s
            self.num_failures += 1
            self.is_tried = False
            if not self.is_closed:
                self.open_until_s = now_s + self._pause_s()

    def allows(self, now_s: float) -> bool:
        """Whether the replica may get a request now."""
        return self.is_closed or now_s >= self.open_until_s

    def placed(self, now_s: float) -> None:
        """Note a request that is sent there: a trial, where it had been left alone.

        Until it has succeeded no other one follows, unless nothing is heard of it for a pause.
        """
        if not self.is_closed and now_s >= self.open_until_s:
            self.is_tried = True
            self.open_until_s = now_s + self._pause_s()

    def _pause_s(self) -> float:
        doublings = min(self.num_failures - MAX_FAILURES, 10)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(1 << doublings))


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A replica that gets no requests for so long, if there is another one; then one as a trial."""

    endpoint: str
    num_failures: int
    why: str
    for_s: float


class CircuitBreakers:
    """One for each replica that has failed since its last success, by its endpoint.

    The endpoint is the same over restarts, so a replica that dies whenever it serves is found, too.
    """

    def __init__(self) -> None:
        self._by_endpoint: dict[str, CircuitBreaker] = {}
        self._changes: list[LeftAlone] = []

    def failed(self, endpoint: str, now_s: float, why: str) -> None:
        """Count a failure: a death, a hang, or an answer that failed by the replica's fault."""
        breaker = self._by_endpoint.pop(endpoint, None) or CircuitBreaker()
        if len(self._by_endpoint) >= MAX_REPLICAS:
            del self._by_endpoint[next(iter(self._by_endpoint))]
        self._by_endpoint[endpoint] = breaker
        was_closed = breaker.is_closed
        breaker.fail(now_s, why)
        if was_closed and not breaker.is_closed:
            self._changes.append(_left_alone(endpoint, breaker, now_s))

    def succeeded(self, endpoint: str) -> None:
        """Count an answer that ended well."""
        if self._by_endpoint:
            breaker = self._by_endpoint.pop(endpoint, None)
            if breaker is not None and not breaker.is_closed:
                self._changes.append(LeftAlone(endpoint, 0, "", 0.0))

    def left_alone(self, now_s: float) -> list[LeftAlone]:
        """Return the replicas that are left alone, or have yet to succeed in a trial."""
        return [
            _left_alone(endpoint, breaker, now_s)
            for endpoint, breaker in self._by_endpoint.items()
            if not breaker.is_closed
        ]

    def changes(self) -> list[LeftAlone]:
        """Return who has begun to be left alone since the last call, or, with 0 failures, ended."""
        changes, self._changes = self._changes, []
        return changes

    def allows(self, endpoint: str, now_s: float) -> bool:
        breaker = self._by_endpoint.get(endpoint)
        return breaker is None or breaker.allows(now_s)

    def placed(self, endpoint: str, now_s: float) -> None:
        breaker = self._by_endpoint.get(endpoint)
        if breaker is not None:
            breaker.placed(now_s)

    def forget(self, now_s: float) -> None:
        """Forget what may be gone for good: no failure of late. Call it at every tick."""
        for endpoint, breaker in [*self._by_endpoint.items()]:
            if now_s - breaker.failed_at_s > FORGET_S:
                del self._by_endpoint[endpoint]


def _left_alone(endpoint: str, breaker: CircuitBreaker, now_s: float) -> LeftAlone:
    for_s = max(0.0, breaker.open_until_s - now_s)
    return LeftAlone(endpoint, breaker.num_failures, breaker.why, for_s)
