from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.runner.row_costs import measure, still_hold
from services.compute.step import NO_IDS, StepPlan, StepResult
from tests.unit.compute.fake_device import make_spec


class TimedRunner:
    """Steps take a while, and so much for each row and each pass of a drafter."""

    def __init__(
        self, base_s: float, row_s: float, pass_s: float = 0.0, num_stages: int = 1
    ) -> None:
        self.base_s, self.row_s, self.pass_s = base_s, row_s, pass_s
        self.num_stages = num_stages
        self.num_steps = 0
        self.now_s = 0.0

    def spec(self) -> RunnerSpec:
        computes = self.pass_s > 0.0
        return make_spec(
            max_num_seqs=40,
            overlaps=False,
            max_drafts=7 * computes,
            computes_drafts=computes,
            num_stages=self.num_stages,
        )

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def go_on(self, plan: StepPlan) -> bool:
        return True

    def sample(self, plan: StepPlan) -> StepPlan:
        return plan

    def result(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        num_rows = plan.num_decode_rows + int(plan.num_drafts.sum())
        took_s = self.base_s + self.row_s * num_rows
        took_s += self.pass_s * int(plan.num_drafts.max(initial=0))
        self.now_s += self.num_stages * took_s
        none = np.zeros(0, dtype=np.bool_)
        return StepResult(plan.step_id, NO_IDS, NO_IDS, none, computed_s=took_s)


def runner(base_s: float, row_s: float, pass_s: float = 0.0) -> Runner:
    return cast(Runner, TimedRunner(base_s, row_s, pass_s))


def test_steps_are_timed_by_their_rows_up_to_as_many_as_there_may_be() -> None:
    costs = measure(runner(1.0, 0.5))
    assert costs.num_rows == (1, 2, 4, 8, 16, 32)
    assert costs.step_s == pytest.approx([1.5, 2.0, 3.0, 5.0, 9.0, 17.0])


def test_costs_hold_while_more_rows_take_as_much_more_on_whatever_clock() -> None:
    costs = measure(runner(1.0, 0.5))
    assert still_hold(costs, runner(10.0, 5.0))
    assert not still_hold(costs, runner(1.0, 0.05))
    assert not still_hold(costs, runner(0.1, 0.5))


def test_of_stages_the_way_through_all_of_them_is_timed() -> None:
    stages: Any = TimedRunner(0.001, 0.0005, num_stages=2)
    costs = measure(stages, lambda: stages.now_s)
    assert costs.step_s[:3] == pytest.approx([0.003, 0.004, 0.006])


def test_a_pass_is_what_a_step_takes_longer_than_with_as_many_rows_without() -> None:
    costs = measure(runner(1.0, 0.5, pass_s=0.75))
    assert costs.pass_s == pytest.approx([0.75] * 5)
    assert still_hold(costs, runner(10.0, 5.0, pass_s=7.5))
    assert not still_hold(costs, runner(1.0, 0.5, pass_s=2.0))
    assert not still_hold(costs._replace(pass_s=(0.0,)), runner(1.0, 0.5, pass_s=0.75))
