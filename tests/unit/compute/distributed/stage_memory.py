"""The stages of a model in one process: what they exchange lies in lists."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.stages import Stages
from services.compute.runner.eager import load_eager
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

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        made = self._made[self.number]
        if not made:
            return None
        assert (made[0].shape, made[0].dtype) == (shape, dtype)
        return made.popleft()

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


class StagesHere:
    """The other stages of a pipeline, which make each call as soon as they are told."""

    def __init__(self, folder: Path, settings: ComputeSettings, count: int) -> None:
        made: list[deque[Tensor]] = [deque() for _ in range(count)]
        stages: list[Stages] = [MemoryStages(number, count, made) for number in range(count)]
        *others, last = [load_eager(folder, settings, stages=each) for each in stages]
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
