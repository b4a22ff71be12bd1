"""Measures what steps of decode rows take, before anything is served."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from services.compute.runner.protocol import Runner
from services.compute.speculative.step_costs import StepCosts
from services.compute.step import NO_IDS, StepPlan

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
