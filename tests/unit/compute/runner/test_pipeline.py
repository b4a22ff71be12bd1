"""The last stage makes each call in its turn, whatever the others have been told meanwhile."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from common.errors import FatalError
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import UploadKind
from services.compute.runner.frames import TRANSFER, TRANSFERRED
from services.compute.runner.pipeline import PipelineExecutor
from services.compute.step import Int32Array

PAGES = PagePairs(array("i", [1]), array("i", [2]))


class Last:
    """An executor that needs two goes for a step, and notes the uploads that it takes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made: list[object] = []
        self._buffer = np.zeros(32, dtype=np.int32)
        self._error = error
        self._num_goes = 0

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._buffer

    def enter(self, num_ints: int) -> None:
        self.made.append(("enter", int(self._buffer[num_ints - 1])))

    def forward(self, num_ints: int) -> int:
        step = int(self._buffer[num_ints - 1])
        self.made.append(("forward", step))
        return step

    def go_on(self, ticket: int) -> bool:
        if self._error is not None:
            raise self._error
        self._num_goes += 1
        return self._num_goes % 2 == 0

    def sample(self, ticket: int, num_ints: int) -> int:
        self.made.append(("sample", ticket))
        return ticket

    def ready(self, ticket: int) -> bool:
        return ("sample", ticket) in self.made

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self.made.append("transfer")

    def transferred(self, ticket: None) -> bool:
        return True


class Told:
    """Other stages, which only listen."""

    def __init__(self) -> None:
        self.kinds: list[int] = []

    def send(self, kind: int, ints: Int32Array) -> None:
        self.kinds.append(kind)

    def close(self) -> None:
        pass


def pipeline(error: Exception | None = None) -> tuple[PipelineExecutor, Last, Told]:
    last, told = Last(error), Told()
    executor: Any = last
    return PipelineExecutor(executor, told), last, told


def forward(executor: PipelineExecutor, step: int) -> Any:
    ints = executor.buffer(UploadKind.STEP)
    ints[:16] = 1  # it has rows
    ints[15] = step
    return executor.forward(16)


def test_a_step_is_begun_when_the_one_before_is_done() -> None:
    executor, last, told = pipeline()
    first = forward(executor, 1)
    executor.buffer(UploadKind.ENTRIES)[0] = 7
    executor.enter(1)
    second = forward(executor, 2)
    assert told.kinds == [UploadKind.STEP, UploadKind.ENTRIES, UploadKind.STEP]
    assert last.made == []
    assert not executor.go_on(first) and executor.go_on(first)
    executor.sample(first, 0)
    assert executor.ready(first) and not executor.ready(second)
    assert not executor.go_on(second)
    assert last.made == [("forward", 1), ("sample", 1), ("enter", 7), ("forward", 2)]


def test_pages_are_copied_behind_the_steps_before_and_without_any() -> None:
    executor, last, told = pipeline()
    step = forward(executor, 1)
    ticket = executor.transfer(Direction.TO_HOST, PAGES)
    assert not executor.transferred(ticket)
    executor.go_on(step)
    assert not executor.transferred(ticket)  # the step is under way
    executor.go_on(step)
    assert executor.transferred(ticket)
    assert executor.transferred(executor.transfer(Direction.TO_DEVICE, PAGES))
    assert last.made == [("forward", 1), "transfer", "transfer"]
    assert told.kinds[1:] == [TRANSFER, TRANSFERRED] * 2


def test_a_step_that_breaks_by_its_upload_is_followed_by_others() -> None:
    executor, last, _ = pipeline(ValueError("this prompt cannot be scored"))
    with pytest.raises(ValueError, match="cannot be scored"):
        executor.go_on(forward(executor, 1))
    assert executor.transferred(executor.transfer(Direction.TO_HOST, PAGES))


def test_what_else_goes_wrong_in_one_stage_ends_all() -> None:
    executor, _, _ = pipeline(RuntimeError("out of memory"))
    with pytest.raises(FatalError, match="out of memory"):
        executor.go_on(forward(executor, 1))
