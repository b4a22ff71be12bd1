"""The stages of a model in one process: what they exchange lies in lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.stages import Stages
from services.compute.runner.eager import load_eager
from services.compute.runner.executor import Executor
from services.compute.runner.frames import Frame, RepeatedCalls
from services.compute.runner.pipeline import PipelineExecutor
from services.compute.step import Int32Array


class MemoryStages:
    """One of them; what it makes of a step lies before the next one."""

    num_here = 1

    def __init__(self, number: int, count: int, made: list[deque[Tensor]]) -> None:
        self.number, self.count = number, count
        self._made = made

    def send(self, x_TE: Tensor) -> None:
        self._made[self.number + 1].append(x_TE.clone())

    def receive(self, room_TE: Tensor, wait_ms: int) -> bool:
        made = self._made[self.number]
        if not made:
            return False
        assert (made[0].shape, made[0].dtype) == (room_TE.shape, room_TE.dtype)
        room_TE.copy_(made.popleft())
        return True

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


def load_on_cpu(folder: Path, settings: ComputeSettings, stages: Stages) -> Executor:
    return load_eager(folder, settings, stages=stages)


class StagesHere:
    """The other stages of a pipeline, which make each call as soon as they are told."""

    def __init__(
        self,
        folder: Path,
        settings: ComputeSettings,
        count: int,
        load: Callable[[Path, ComputeSettings, Stages], Executor] = load_on_cpu,
    ) -> None:
        made: list[deque[Tensor]] = [deque() for _ in range(count)]
        stages: list[Stages] = [MemoryStages(number, count, made) for number in range(count)]
        *others, last = [load(folder, settings, each) for each in stages]
        self._calls = [RepeatedCalls(each) for each in others]
        self._made = made[-1]
        self.most_ahead = 0  # steps that the last one has not begun
        self.executor = PipelineExecutor(last, self)

    def send(self, kind: int, ints: Int32Array) -> None:
        for calls in self._calls:
            own = calls.room(kind, len(ints))
            own[:] = ints
            calls.repeat(Frame(kind, own))
        self.most_ahead = max(self.most_ahead, len(self._made))

    def close(self) -> None:
        pass
