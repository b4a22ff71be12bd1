"""Endings: the one terminal of an attempt, and everything it had, given back."""

from __future__ import annotations

from common.messages.failure import Ending, EndReason, Failure
from services.compute.scheduler.attempts import OpenAttempts
from services.compute.scheduler.events import EventLog
from services.compute.scheduler.forks import Forks
from services.compute.scheduler.residents import Residents
from services.compute.scheduler.sequence import Sequence, Status
from services.compute.scheduler.transfers import Transfers
from services.compute.scheduler.waiting import WaitingLine


class Endings:
    """Ends sequences wherever they are.

    Pages are free at once, also those that a step in flight still writes to: one stream orders
    all writes, so the next owner's come later. What that step samples is discarded by commit.
    """

    __slots__ = ("_attempts", "_forks", "_log", "_residents", "_transfers", "_waiting")

    def __init__(
        self,
        attempts: OpenAttempts,
        residents: Residents,
        waiting: WaitingLine,
        forks: Forks,
        transfers: Transfers,
        log: EventLog,
    ) -> None:
        self._attempts = attempts
        self._residents = residents
        self._waiting = waiting
        self._forks = forks
        self._transfers = transfers
        self._log = log

    def end(self, sequence: Sequence, reason: EndReason, failure: Failure | None = None) -> None:
        """End a sequence without a new token."""
        self._log.ended(sequence, Ending(reason, sequence.usage(), failure=failure))
        self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Give back slot, pages and place in line; the terminal has been logged."""
        match sequence.status:
            case Status.RUNNING:
                self._residents.leave(sequence)
            case Status.PARKED:
                self._forks.leave(sequence)
            case Status.WAITING:
                self._waiting.remove(sequence)
            case Status.SWAPPED:
                self._waiting.remove(sequence)
                self._transfers.drop(sequence.host_pages)
                sequence.host_pages = []
            case Status.ENDED:
                raise RuntimeError(f"{sequence.attempt} ends twice")
        sequence.table.release()
        sequence.status = Status.ENDED
        sequence.live = False
        self._attempts.remove(sequence)
        self._forks.succeed(sequence)
