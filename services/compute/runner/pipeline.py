"""The executor of a pipeline: the last stage's, all of whose calls the other stages make, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from services.compute.expert_counters import ExpertCounters
from services.compute.kernels.step.step_buffers import NUM_ROWS
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.frames import TRANSFER, TRANSFERRED, transfer_ints
from services.compute.runner.leader import fatal_if_ranks_part
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import Int32Array, StepResult, int32_array


class OtherStages(Protocol):
    """Where the other stages' calls go; a frame's int32 stay as they are."""

    def send(self, kind: int, ints: Int32Array) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class PipelineTicket:
    """A call that all stages have been told to make, and the last one's own ticket, once it has."""

    number: int = 0  # of a transfer
    own: Any = None
    is_made: bool = False


class DueCall(NamedTuple):
    """One that is still to be made here."""

    ticket: PipelineTicket
    make: Callable[[], Any]
    computes: bool


class PipelineExecutor:
    """Tells the other stages of a call at once, and makes it here in its turn.

    So there are steps in all stages: each begins one when it has done the one before and has what
    the stage before makes of it, and the last one's tokens are the step's. They come back to the
    first stage in the uploads of later steps.
    """

    def __init__(self, executor: Executor, others: OtherStages) -> None:
        self._executor = executor
        self._others = others
        self._due: deque[DueCall] = deque()
        self._computing: PipelineTicket | None = None
        self._num_transfers = 0

    def spec(self) -> RunnerSpec:
        return self._executor.spec()

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._executor.buffer(kind)

    def enter(self, num_ints: int) -> None:
        self._upload(UploadKind.ENTRIES, num_ints, self._executor.enter, computes=False)

    def forward(self, num_ints: int) -> PipelineTicket:
        computes = bool(self.buffer(UploadKind.STEP)[NUM_ROWS])
        return self._upload(UploadKind.STEP, num_ints, self._executor.forward, computes)

    def go_on(self, ticket: PipelineTicket) -> bool:
        """Compute the oldest step for a while, or wait for a moment for what it needs."""
        while not ticket.is_made:
            self._make_next()
        try:
            is_done = fatal_if_ranks_part(lambda: self._executor.go_on(ticket.own))
        except ValueError:
            self._computing = None
            raise
        if is_done:
            self._computing = None
        return is_done

    def sample(self, ticket: PipelineTicket, num_ints: int) -> PipelineTicket:
        ticket.own = fatal_if_ranks_part(lambda: self._executor.sample(ticket.own, num_ints))
        return ticket

    def result(self, ticket: PipelineTicket) -> StepResult:
        return self._executor.result(ticket.own)

    def ready(self, ticket: PipelineTicket) -> bool:
        return ticket.is_made and self._executor.ready(ticket.own)

    def transfer(self, direction: Direction, pages: PagePairs) -> PipelineTicket:
        ticket = PipelineTicket(self._num_transfers)
        self._num_transfers += 1
        self._others.send(TRANSFER, transfer_ints(direction, pages))
        self._later(ticket, lambda: self._executor.transfer(direction, pages), computes=False)
        return ticket

    def transferred(self, ticket: PipelineTicket) -> bool:
        while self._due and not (self._computing or self._due[0].computes):
            self._make_next()
        is_done = ticket.is_made and self._executor.transferred(ticket.own)
        if is_done:
            self._others.send(TRANSFERRED, int32_array((ticket.number,)))
        return is_done

    def expert_counters(self) -> ExpertCounters | None:
        return self._executor.expert_counters()

    def close(self) -> None:
        self._others.close()  # first: their ranks are linked to this stage's
        self._executor.close()

    def _upload(
        self, kind: UploadKind, num_ints: int, call: Callable[[int], Any], computes: bool
    ) -> PipelineTicket:
        ints = self.buffer(kind)[:num_ints].copy()
        self._others.send(kind, ints)

        def make() -> Any:
            self.buffer(kind)[:num_ints] = ints
            return call(num_ints)

        ticket = PipelineTicket()
        self._later(ticket, make, computes)
        return ticket

    def _later(self, ticket: PipelineTicket, make: Callable[[], Any], computes: bool) -> None:
        self._due.append(DueCall(ticket, make, computes))

    def _make_next(self) -> None:
        ticket, make, computes = self._due.popleft()
        ticket.own = fatal_if_ranks_part(make)
        ticket.is_made = True
        self._computing = ticket if computes else None
