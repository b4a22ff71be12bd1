"""The executor: the device, seen from a runner that packs plans."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from services.compute.expert_counters import ExpertCounters
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import Int32Array, StepResult


class UploadKind(IntEnum):
    """What an upload is, in the order in which those of a step come."""

    ENTRIES = 1
    STEP = 2
    MASKS = 3


class Executor(Protocol):
    """Executes uploads (`runner.uploads`) in the order given: a runner without plans.

    The caller writes an upload to `buffer` of its kind and says how many int32 it has. Nothing else
    goes to an executor but the pages of transfers, so that it may as well run in another process,
    beside others of its rank, or again from a recording.
    """

    def spec(self) -> RunnerSpec: ...

    def buffer(self, kind: UploadKind) -> Int32Array:
        """Where the next upload of this kind is to be written."""
        ...

    def enter(self, num_ints: int) -> None:
        """Take what new sequences bring; their slot rows come with the step."""
        ...

    def forward(self, num_ints: int) -> Any:
        """Apply a step's deltas and launch its forward pass, if it has rows; returns a ticket."""
        ...

    def go_on(self, ticket: Any) -> bool:
        """As a runner's: compute for a while; returns whether the forward pass is done."""
        ...

    def sample(self, ticket: Any, num_ints: int) -> Any:
        """Launch the sampling, under masks if there are int32 of them; return the ticket."""
        ...

    def result(self, ticket: Any) -> StepResult: ...

    def ready(self, ticket: Any) -> bool: ...

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        """As a runner's: start copying pages; returns a ticket."""
        ...

    def transferred(self, ticket: Any) -> bool: ...

    def expert_counters(self) -> ExpertCounters | None: ...

    def close(self) -> None: ...
