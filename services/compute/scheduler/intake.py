"""Intake: from a request to sequences in line, or to a terminal at once."""

from __future__ import annotations

from common.messages.address import AttemptId
from services.compute.scheduler.attempts import OpenAttempts
from services.compute.scheduler.door import MAX_CHOICES, Door
from services.compute.scheduler.events import EventLog
from services.compute.scheduler.forks import Forks
from services.compute.scheduler.nursery import Nursery
from services.compute.scheduler.protocol import Request
from services.compute.scheduler.waiting import WaitingLine


class Intake:
    """Every choice of a request gets exactly one terminal, here or later.

    A choice whose attempt is open already is passed over: its terminal is still to come.
    """

    __slots__ = ("_attempts", "_door", "_forks", "_log", "_nursery", "_waiting")

    def __init__(
        self,
        door: Door,
        nursery: Nursery,
        attempts: OpenAttempts,
        waiting: WaitingLine,
        forks: Forks,
        log: EventLog,
    ) -> None:
        self._door = door
        self._nursery = nursery
        self._attempts = attempts
        self._waiting = waiting
        self._forks = forks
        self._log = log

    def add(self, request: Request, now_s: float) -> None:
        """Take a request in, or say why not."""
        choices = self._open_choices(request, now_s)
        if not choices:
            return
        num_waiting = len(self._waiting) + self._forks.num_parked
        failure = self._door.refusal(request) or self._door.overload(request, num_waiting)
        if failure is not None:
            for attempt in choices.values():
                self._log.never_began(request, attempt, "refused", failure)
            return
        sequences = self._nursery.make(request, choices)
        ending = sequences[0].ending()
        if ending is not None:  # of this retry's first try, only the terminal was lost
            for sequence in sequences:
                self._log.ended(sequence, ending)
            return
        leader, *followers = sequences
        self._attempts.add(leader)
        self._waiting.add(leader)
        for follower in followers:
            self._attempts.add(follower)
        self._forks.park(leader, followers)

    def _open_choices(self, request: Request, now_s: float) -> dict[int, AttemptId]:
        """The choices to begin, without those that run already or were aborted before."""
        attempts = self._attempts
        choices: dict[int, AttemptId] = {}
        for index in range(min(max(request.num_choices, 1), MAX_CHOICES)):
            attempt = AttemptId(request.attempt.router, request.attempt.counter + index)
            if attempts.get(attempt) is not None:
                continue
            if attempts.tombstones.covers(attempt, now_s):
                self._log.never_began(request, attempt, "aborted", None)
            else:
                choices[index] = attempt
        return choices
