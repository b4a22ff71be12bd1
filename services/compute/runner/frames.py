"""Frames: the calls of an executor as a kind and so many int32, and the calls made again of them.

Whoever makes them again has the same executor in the same state, in a follower or a replay.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from services.compute.kernels.step.step_buffers import NUM_ROWS
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.uploads import StepUpload
from services.compute.step import Int32Array, StepResult

RESULT, TRANSFER, TRANSFERRED = 100, 101, 102
"""Kinds of frames beside those of uploads. A result begins with its step's id, the low int32 first.
A transfer is its direction, then sources, then targets. The frame of its end says which transfer it
was, counted from 0."""
STEP_ID_INTS = 2

POLL_S = 0.0001


class Frame(NamedTuple):
    kind: int
    ints: Int32Array

    @property
    def step_id(self) -> int:
        """The step of a result."""
        return int(self.ints[:STEP_ID_INTS].view(np.int64)[0])


def step_id_ints(step_id: int) -> Int32Array:
    return np.array([step_id], dtype=np.int64).view(np.int32)


def transfer_ints(direction: Direction, pages: PagePairs) -> Int32Array:
    first = np.array([direction], dtype=np.int32)
    return np.concatenate((first, *pages))


class RepeatedCalls:
    """Makes the calls of frames again, with the tickets that they return."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: Any = None
        self._sampled: dict[int, Any] = {}  # by step
        self._transfers: dict[int, Any] = {}  # under way, by number
        self._num_transfers = 0
        self.num_steps = 0
        self.step_id = -1

    def room(self, kind: int, num_ints: int) -> Int32Array:
        """Where the int32 of the next frame, of this kind, are to be written."""
        if kind < RESULT:
            return self._executor.buffer(UploadKind(kind))[:num_ints]
        return np.empty(num_ints, dtype=np.int32)

    def repeat(self, frame: Frame) -> StepResult | None:
        """Make the call of a frame whose int32 are where `room` said; a result is returned."""
        executor, (kind, ints) = self._executor, frame
        match kind:
            case UploadKind.ENTRIES:
                executor.enter(len(ints))
            case UploadKind.STEP:
                self._forward(ints)
            case UploadKind.MASKS:
                self._sampled[self.step_id] = executor.sample(self._launched, len(ints))
            case _ if kind == RESULT:
                return executor.result(self._sampled.pop(frame.step_id))
            case _ if kind == TRANSFER:
                pages = PagePairs(*np.split(ints[1:], 2))
                self._transfers[self._num_transfers] = executor.transfer(Direction(ints[0]), pages)
                self._num_transfers += 1
            case _:
                ticket = self._transfers.pop(int(ints[0]))
                while not executor.transferred(ticket):
                    time.sleep(POLL_S)
        return None

    def _forward(self, ints: Int32Array) -> None:
        step = StepUpload.read(ints)
        self.step_id = step.step_id
        self.num_steps += bool(step.header[NUM_ROWS])
        with suppress(ValueError):  # prompts that cannot be scored: so it was
            self._launched = self._executor.forward(len(ints))
            while not self._executor.go_on(self._launched):
                pass
