"""A simulated device on a virtual clock, and plans for it."""

from __future__ import annotations

import numpy as np

from services.compute.runner.protocol import KVGroup, RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.step import SlotDelta, StepPlan

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
    rows = np.arange(len(indices), dtype=np.int32)
    none = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step_id=0,
        num_decode_rows=len(indices),
        row_slot=rows,
        row_epoch=rows,
        q_start=rows,
        q_len=np.ones_like(rows),
        pos_upper=rows + 1,
        tokens=np.zeros(len(indices) + num_prefill, dtype=np.int32),
        sample_row=rows,
        sample_index=np.array(indices, dtype=np.int32),
        page_slot=none,
        page_index=none,
        page_id=none,
        slots=slots,
    )


def runner(clock: Clock) -> SimRunner:
    return SimRunner(SPEC, LatencyModel(0.005, 0.001, 0.0001), clock, clock.sleep)
