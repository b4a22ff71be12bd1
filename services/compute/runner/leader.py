"""The leader: rank 0's executor, whose every call the followers make, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from common.errors import FatalError
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import Executor, OuterExecutor, UploadKind
from services.compute.runner.frames import (
    RESULT,
    TRANSFER,
    TRANSFERRED,
    step_id_ints,
    transfer_ints,
)
from services.compute.runner.group import FollowerGroup
from services.compute.runner.uploads import StepUpload
from services.compute.step import Int32Array, StepResult, int32_array

T = TypeVar("T")


class LeaderTicket(NamedTuple):
    """A call that all ranks have made: which one it is, and the leader's own ticket."""

    number: int  # of a step: its id
    own: Any


class LeaderExecutor(OuterExecutor):
    """An executor that has the followers make each call, and then makes it itself.

    Ranks that have parted never meet again: whatever goes wrong in one of them ends the process,
    and with it the group. But a ValueError of a forward pass follows from the upload: all ranks
    have it, and go on.
    """

    def __init__(self, executor: Executor, group: FollowerGroup) -> None:
        super().__init__(executor)
        self._group = group
        self._num_transfers = 0

    def enter(self, num_ints: int) -> None:
        ints = self.buffer(UploadKind.ENTRIES)[:num_ints]
        self._all_ranks(UploadKind.ENTRIES, ints, lambda: self._executor.enter(num_ints))

    def forward(self, num_ints: int) -> LeaderTicket:
        ints = self.buffer(UploadKind.STEP)[:num_ints]
        step_id = StepUpload.read(ints).step_id
        own = self._all_ranks(UploadKind.STEP, ints, lambda: self._executor.forward(num_ints))
        return LeaderTicket(step_id, own)

    def go_on(self, ticket: LeaderTicket) -> bool:
        is_done = fatal_if_ranks_part(lambda: self._executor.go_on(ticket.own))
        if is_done:
            self._group.sent_is_done()
        return is_done

    def sample(self, ticket: LeaderTicket, num_ints: int) -> LeaderTicket:
        ints = self.buffer(UploadKind.MASKS)[:num_ints]
        sample = self._executor.sample
        own = self._all_ranks(UploadKind.MASKS, ints, lambda: sample(ticket.own, num_ints))
        return LeaderTicket(ticket.number, own)

    def result(self, ticket: LeaderTicket) -> StepResult:
        ints = step_id_ints(ticket.number)
        return self._all_ranks(RESULT, ints, lambda: self._executor.result(ticket.own))

    def ready(self, ticket: LeaderTicket) -> bool:
        return self._executor.ready(ticket.own)

    def transfer(self, direction: Direction, pages: PagePairs) -> LeaderTicket:
        number = self._num_transfers
        self._num_transfers += 1
        ints, transfer = transfer_ints(direction, pages), self._executor.transfer
        own = self._all_ranks(TRANSFER, ints, lambda: transfer(direction, pages))
        return LeaderTicket(number, own)

    def transferred(self, ticket: LeaderTicket) -> bool:
        is_done = self._executor.transferred(ticket.own)
        if is_done:  # steps from here on may use its pages, and all ranks have to have them
            self._all_ranks(TRANSFERRED, int32_array((ticket.number,)), lambda: None)
        return is_done

    def close(self) -> None:
        self._executor.close()
        self._group.close()

    def _all_ranks(self, kind: int, ints: Int32Array, call: Callable[[], T]) -> T:
        self._group.send(kind, ints)
        done = fatal_if_ranks_part(call)
        # A step in stages is done when what another one makes of it has come.
        if kind != UploadKind.STEP or self.spec().num_stages == 1:
            self._group.sent_is_done()
        return done


def fatal_if_ranks_part(call: Callable[[], T]) -> T:
    try:
        return call()
    except (FatalError, ValueError):
        raise
    except Exception as error:
        raise FatalError(f"rank 0 failed, and the others may not have: {error}") from error
