"""What a step of so many rows takes, as measured on this device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.compute.runner.protocol import Runner
from services.compute.step import NO_IDS, StepPlan


class StepCosts(NamedTuple):
    """Seconds of steps of decode rows, by their number; in between, and beyond, on a line."""

    num_rows: tuple[int, ...]  # rising
    step_s: tuple[float, ...]

    def seconds(self, num_rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        inside: npt.NDArray[np.float64] = np.interp(num_rows, self.num_rows, self.step_s)
        if len(self.num_rows) < 2:
            return inside
        rise_s = (self.step_s[-1] - self.step_s[-2]) / (self.num_rows[-1] - self.num_rows[-2])
        beyond = np.maximum(np.asarray(num_rows) - self.num_rows[-1], 0)
        seconds: npt.NDArray[np.float64] = inside + beyond * max(rise_s, 0.0)
        return seconds


MEASURED_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REPEATS = 5
MOST_S = 20.0  # that a start may take for it


def measure(runner: Runner, clock: Callable[[], float] = time.monotonic) -> StepCosts:
    """Time steps of decode rows of a runner that serves nothing yet: the least of a few each."""
    spec, until_s = runner.spec(), clock() + MOST_S
    sizes, step_s = [], []
    step_id = itertools.count(-(1 << 32))  # below those of all plans
    for num_rows in MEASURED_ROWS:
        if num_rows > spec.max_num_seqs or clock() > until_s:
            break
        took_s = [_time(runner, _plan(next(step_id), num_rows)) for _ in range(REPEATS)]
        sizes.append(num_rows)
        step_s.append(min(took_s))
    return StepCosts(tuple(sizes), tuple(step_s))


def _time(runner: Runner, plan: StepPlan) -> float:
    ticket = runner.forward(plan)
    while not runner.go_on(ticket):
        pass
    result = runner.result(runner.sample(ticket))
    if np.isnan(result.computed_s):
        return result.device_end_s - result.device_start_s
    return result.computed_s


def _plan(step_id: int, num_rows: int) -> StepPlan:
    """Rows of as many slots, each the first position of a sequence, in a page that nobody has."""
    slots = np.arange(num_rows, dtype=np.int32)
    none = np.zeros(num_rows, dtype=np.int32)
    return StepPlan(
        step_id=step_id,
        num_decode_rows=num_rows,
        row_slot=slots,
        row_epoch=none,
        q_start=none,
        q_len=none + 1,
        pos_upper=none + 1,
        tokens=none,
        sample_row=slots,
        sample_index=none,
        page_slot=NO_IDS,
        page_index=NO_IDS,
        page_id=NO_IDS,
    )
