"""What a router learns of a compute's speed from its heartbeats."""

from __future__ import annotations

import pytest

from common.messages.control import Load, StepReport
from services.router.step_pace import StepPace


def _heard(pace: StepPace, at_s: float, num_running: int, num_steps: int) -> None:
    pace.heard(Load(num_running, 0, 64, steps=StepReport(num_steps, 0, 0)), at_s)


def test_steps_are_timed_between_two_heartbeats_with_work() -> None:
    pace = StepPace()
    _heard(pace, 0.0, 4, 100)
    assert pace.step_s(1) == 0.0
    _heard(pace, 0.5, 4, 150)
    assert pace.step_s(1) == pace.step_s(64) == 0.01


def test_a_time_belongs_to_the_number_of_requests() -> None:
    pace = StepPace()
    for at_s, num_running, num_steps in ((0.0, 1, 0), (0.5, 1, 50), (1.0, 32, 60), (1.5, 32, 70)):
        _heard(pace, at_s, num_running, num_steps)
    assert (pace.step_s(2), pace.step_s(60)) == (0.01, 0.05)


def test_idle_moments_make_a_compute_hardly_slower() -> None:
    pace = StepPace()
    for at_s, num_running, num_steps in (
        *((0.0, 2, 0), (0.5, 2, 50)),
        *((1.0, 2, 51), (1.5, 0, 51), (2.0, 2, 51), (2.5, 2, 51)),
    ):
        _heard(pace, at_s, num_running, num_steps)
    assert pace.step_s(2) == pytest.approx(0.01 + 0.2 * (0.5 - 0.01))
    _heard(pace, 3.0, 2, 101)
    assert pace.step_s(2) == 0.01


def test_a_worker_without_steps_is_not_measured() -> None:
    pace = StepPace()
    for at_s in (0.0, 0.5):
        pace.heard(Load(1, 0, 64), at_s)
    assert pace.step_s(1) == 0.0
