"""Sends what has lost its workers on to others, or lets it wait for some, or fails it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from common.messages.failure import TOO_LONG, Failure
from common.messages.text import AttemptRefused
from common.turns import Turns
from services.router.attempts import WORKER_LOST, AbortedAttempt, Choice
from services.router.failover import may_wait
from services.router.fleet import Fleet
from services.router.groups import Group
from services.router.holding import Patience
from services.router.inflight import InflightTable

Retry: TypeAlias = Callable[[Sequence[Choice], Group, float], Failure | None]
Abort: TypeAlias = Callable[[Iterable[AbortedAttempt]], None]


class Recovery:
    """Retries the displaced choices of the table, one after the other."""

    def __init__(
        self,
        fleet: Fleet,
        inflight: InflightTable,
        turns: Turns,
        patience: Patience,
        retry: Retry,
        abort: Abort,
    ) -> None:
        """`retry` begins another attempt in a complete group; a failure ends the request."""
        self._fleet = fleet
        self._inflight = inflight
        self._turns = turns
        self._patience = patience
        self._retry = retry
        self._abort = abort
        self._number = 0  # of the last one
        self._num_displaced = 0  # that it knows of

    def recover_new(self) -> None:
        """Go on with choices that have lost their workers since the last call of `recover`."""
        if self._inflight.num_displaced != self._num_displaced:
            self.recover()

    def recover(self) -> None:
        """Send the choices that lost their workers on to others, the most advanced first."""
        self._num_displaced = self._inflight.num_displaced
        self._number += 1
        self._turns.begin(self._retries(self._number))

    def _retries(self, recovery: int) -> Iterator[None]:
        """Try displaced choices again, one at each step, unless a later recovery has begun."""
        displaced = self._inflight.displaced
        for choices in self._inflight.to_retry():
            # Unless another choice has failed the request meanwhile.
            if choices[0] in displaced and not self._recovers(choices, self._turns.clock()):
                return
            yield
            if recovery != self._number:
                return

    def _recovers(self, choices: Sequence[Choice], now_s: float) -> bool:
        """Begin another attempt, fail the request or wait; False if no more retries may begin."""
        request, setbacks = choices[0].request, choices[0].setbacks
        group = self._fleet.of_revision(request.card)
        able = group.without(setbacks.refused_by)
        failure, patience_s = None, self._patience.of_s(group)
        if not able.missing:  # whether the doubted ones are lost, too, is known in a moment
            sure = able.without(self._fleet.doubted(now_s))
            if not sure.missing and not self._fleet.retries.take(now_s):
                return False
            failure = None if sure.missing else self._retry(choices, sure, now_s)
        elif may_wait(setbacks, now_s, patience_s, group.missing, request.has_begun):
            if not group.missing:
                for each in choices:
                    each.setbacks.forget_refusals(now_s)
        else:
            failure = setbacks.failure or WORKER_LOST
        if failure is not None:
            self._abort(self._inflight.fail(request, failure))
        return True

    def judged(self, refused: AttemptRefused) -> AttemptRefused:
        """Make a refusal retryable whose prompt is too long for its compute, and not for all."""
        failure, attempt = refused.failure, self._inflight.attempt_of(refused.attempt.counter)
        if failure.code != TOO_LONG or attempt is None:
            return refused
        group = self._fleet.of_revision(attempt.choice.request.card)
        lengths = (each.model.max_input_length for each in group.workers["compute"])
        if all(most < failure.prompt_tokens for most in lengths):
            return refused
        return replace(refused, failure=replace(failure, retryable=True))
