"""Measures what steps of decode rows take, before anything is served."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from common.messages.sampling import SamplingParams
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.speculative.step_costs import StepCosts
from services.compute.step import NO_IDS, SlotDelta, StepPlan

MEASURED_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS_ON_A_CPU = (1, 2, 4, 8, 16, 32, 64)  # no buckets are filled up there
CHECKED_ROWS = (1, 8)
SAME_RATIO = 1.25  # of these, up to which costs that were kept are still those of this device
REPEATS = 5
REPEATS_ON_A_CPU, ROUNDS_ON_A_CPU = 3, 3  # what else runs there should fall on all sizes
ENOUGH_S = 0.5  # of steps of one size
MOST_S = 20.0  # that a start may take for it
MOST_ON_A_CPU_S = 2.0
LONG_CONTEXT = 2048
LONG_ROWS = 16
SEVERAL_DRAFTS, TURNS = 4, 2  # by which a pass is measured

LeastSeconds: TypeAlias = Callable[[int, int, int], float]
"""Of steps of so many rows, at a position, with so many drafts each."""


def measure(runner: Runner, clock: Callable[[], float] = time.monotonic) -> StepCosts:
    """Time steps of decode rows of a runner that serves nothing yet: the least of a few each."""
    spec = runner.spec()
    until_s = clock() + (MOST_S if spec.overlaps else MOST_ON_A_CPU_S)
    least_s = _timer(runner, clock)
    found_s: dict[int, float] = {}  # by rows
    wanted = MEASURED_ROWS if spec.overlaps else ROWS_ON_A_CPU * ROUNDS_ON_A_CPU
    for num_rows in wanted:
        if num_rows > spec.max_num_seqs:
            continue
        if clock() > until_s:
            break
        found_s[num_rows] = min(least_s(num_rows, 0, 0), found_s.get(num_rows, math.inf))
    sizes, step_s = [*found_s], [*found_s.values()]
    # What more rows take fewer do not exceed, whatever the noise.
    smoothed_s = np.minimum.accumulate(step_s[::-1])[::-1].tolist()
    costs = StepCosts(tuple(sizes), tuple(smoothed_s), rows_together=spec.rows_together)
    if spec.computes_drafts:
        costs = costs._replace(pass_s=_passes_s(spec, costs, least_s, lambda: clock() > until_s))
    num_rows, position = _longest(spec, sizes)
    if not position or clock() > until_s:
        return costs
    more_s = least_s(num_rows, position, 0) - step_s[sizes.index(num_rows)]
    return costs._replace(position_s=max(more_s, 0.0) / (num_rows * position))


def _passes_s(
    spec: RunnerSpec, costs: StepCosts, least_s: LeastSeconds, is_late: Callable[[], bool]
) -> tuple[float, ...]:
    """What a step takes longer with drafts that are computed than with as many rows without, for
    each draft of a row: of several, and in turn, as the difference of two times is noisy."""
    passes_s: list[float] = []
    for num_rows in costs.num_rows:
        num_drafts = min(spec.max_drafts, SEVERAL_DRAFTS, spec.max_num_seqs // num_rows - 1)
        if num_drafts < 1 or (passes_s and is_late()):
            break
        with_s = without_s = math.inf
        for _ in range(TURNS):
            with_s = min(with_s, least_s(num_rows, 0, num_drafts))
            without_s = min(without_s, least_s(num_rows * (1 + num_drafts), 0, 0))
        more_s = (with_s - without_s) / num_drafts
        passes_s.append(max(more_s, 0.0, *passes_s[-1:]))
    return tuple(passes_s)


def still_hold(
    costs: StepCosts, runner: Runner, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Whether what was kept is about what steps take now: by how much more a larger one does, and
    one with drafts that are computed."""
    spec = runner.spec()
    sizes = [size for size in CHECKED_ROWS if size <= spec.max_num_seqs]
    kept_s = costs.seconds(np.array(sizes)).tolist()
    least_s = _timer(runner, clock)
    found_s = [least_s(size, 0, 0) for size in sizes]
    num_drafts = min(spec.max_drafts, SEVERAL_DRAFTS, spec.max_num_seqs - 1)
    if costs.pass_s and num_drafts > 0:
        all_s = float(costs.seconds(np.array(1 + num_drafts)))
        kept_s.append(all_s + num_drafts * costs.pass_s[0])
        found_s.append(least_s(1, 0, num_drafts))
    ratios = [(f / found_s[0]) / (k / kept_s[0]) for f, k in zip(found_s, kept_s, strict=True)]
    return all(1.0 / SAME_RATIO <= ratio <= SAME_RATIO for ratio in ratios)


def _timer(runner: Runner, clock: Callable[[], float]) -> LeastSeconds:
    """What gives the least time of a few steps."""
    step_id = itertools.count(-(1 << 32))  # below those of all plans
    spec = runner.spec()
    # Rows that draw by chance take more than greedy ones: drafts are to pay for those, too.
    drawn = SamplingParams(max_tokens=1, seed=1, temperature=1.0)
    slots = tuple(SlotDelta(slot, 0, drawn, 0, ()) for slot in range(spec.max_num_seqs))
    _time(runner, replace(_plan(spec, next(step_id), 1, 0), slots=slots), clock)
    repeats = REPEATS if spec.overlaps else REPEATS_ON_A_CPU

    def least_s(num_rows: int, position: int, num_drafts: int) -> float:
        until_s, times_s = clock() + ENOUGH_S, list[float]()
        while len(times_s) < repeats and (len(times_s) < 2 or clock() < until_s):
            plan = _plan(spec, next(step_id), num_rows, position)
            if num_drafts:
                plan = replace(plan, num_drafts=np.full(num_rows, num_drafts, dtype=np.int32))
            times_s.append(_time(runner, plan, clock))
        return min(times_s)

    return least_s


def _longest(spec: RunnerSpec, sizes: list[int]) -> tuple[int, int]:
    """Rows of long contexts that there are pages for, and how long; 0 if for none."""
    page_tokens = spec.kv_groups[0].page_tokens
    position = min(LONG_CONTEXT, spec.max_model_len - 2)
    num_pages = len(spec.kv_groups) * (position // page_tokens + 1)
    fitting = [size for size in sizes if size <= LONG_ROWS and size * num_pages <= spec.num_pages]
    return (fitting[-1], position) if fitting else (0, 0)


def _time(runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    """Of several stages, what it takes to pass them all, with what lies between."""
    began_s = clock()
    ticket = runner.forward(plan)
    while not runner.go_on(ticket):
        pass
    result = runner.result(runner.sample(ticket))
    if runner.spec().num_stages > 1:
        return clock() - began_s
    if np.isnan(result.computed_s):
        return result.device_end_s - result.device_start_s
    return result.computed_s


def _plan(spec: RunnerSpec, step_id: int, num_rows: int, position: int) -> StepPlan:
    """Rows of as many slots, at a position of sequences whose pages nobody has written."""
    num_groups, page_tokens = len(spec.kv_groups), spec.kv_groups[0].page_tokens
    shape = num_groups, num_rows, position // page_tokens + 1 if position else 0
    groups, slots, pages = (axis.ravel().astype(np.int32) for axis in np.indices(shape))
    row_slot = np.arange(num_rows, dtype=np.int32)
    starts = np.full(num_rows, position, dtype=np.int32)
    none = np.zeros(num_rows, dtype=np.int32)
    return StepPlan(
        step_id=step_id,
        num_decode_rows=num_rows,
        row_slot=row_slot,
        row_epoch=none,
        q_start=starts,
        q_len=none + 1,
        pos_upper=starts + 1,
        tokens=none,
        sample_row=row_slot,
        sample_index=none,
        page_slot=slots,
        page_index=pages,
        page_id=np.arange(len(slots), dtype=np.int32),
        page_group=groups if num_groups > 1 else NO_IDS,
    )
