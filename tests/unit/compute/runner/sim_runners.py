"""A simulated device on a virtual clock, and plans for it."""

from __future__ import annotations

import numpy as np

from services.compute.kv.memory import KVGroup
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.step import SlotDelta, StepPlan
from tests.unit.compute.step_plans import decode_plan

SPEC = RunnerSpec(100, 1000, (2,), (KVGroup("full", 1, 16, 0),), 64, 0, 8, 512, 5.0)


class Clock:
    """Time that passes when the test or a sleeper says so; every sleep overshoots."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 0.001


def plan(*indices: int, slots: tuple[SlotDelta, ...] = (), num_prefill: int = 0) -> StepPlan:
    rows = [(row, row, index) for row, index in enumerate(indices)]
    tokens = np.zeros(len(rows) + num_prefill, dtype=np.int32)
    return decode_plan(*rows, tokens=tokens, slots=slots)


def runner(clock: Clock) -> SimRunner:
    return SimRunner(SPEC, LatencyModel(0.005, 0.001, 0.0001), clock, clock.sleep)
