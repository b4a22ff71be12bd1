"""The executor: the device, seen from a runner that packs plans."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from services.compute.expert_counters import ExpertCounters
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.protocol import RunnerSpec, StepDevice
from services.compute.step import Int32Array, StepResult


class UploadKind(IntEnum):
    """What an upload is, in the order in which those of a step come."""

    ENTRIES = 1
    STEP = 2
    MASKS = 3


class Executor(StepDevice, Protocol):
    """Executes uploads (`runner.uploads`) in the order given: a runner without plans.

    The caller writes an upload to `buffer` of its kind and says how many int32 it has. Nothing else
    goes to an executor but the pages of transfers, so that it may as well run in another process,
    beside others of its rank, or again from a recording.
    """

    def buffer(self, kind: UploadKind) -> Int32Array:
        """Where the next upload of this kind is to be written."""
        ...

    def enter(self, num_ints: int) -> None:
        """Take what new sequences bring; their slot rows come with the step."""
        ...

    def forward(self, num_ints: int) -> Any:
        """Apply a step's deltas and launch its forward pass, if it has rows; returns a ticket."""
        ...

    def sample(self, ticket: Any, num_ints: int) -> Any:
        """Launch the sampling, under masks if there are int32 of them; return the ticket."""
        ...


class OuterExecutor:
    """An executor around another, which makes every call that is not made otherwise here."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def spec(self) -> RunnerSpec:
        return self._executor.spec()

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._executor.buffer(kind)

    def enter(self, num_ints: int) -> None:
        self._executor.enter(num_ints)

    def forward(self, num_ints: int) -> Any:
        return self._executor.forward(num_ints)

    def go_on(self, ticket: Any) -> bool:
        return self._executor.go_on(ticket)

    def sample(self, ticket: Any, num_ints: int) -> Any:
        return self._executor.sample(ticket, num_ints)

    def result(self, ticket: Any) -> StepResult:
        return self._executor.result(ticket)

    def ready(self, ticket: Any) -> bool:
        return self._executor.ready(ticket)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        return self._executor.transfer(direction, pages)

    def transferred(self, ticket: Any) -> bool:
        return self._executor.transferred(ticket)

    def expert_counters(self) -> ExpertCounters | None:
        return self._executor.expert_counters()

    def close(self) -> None:
        self._executor.close()
