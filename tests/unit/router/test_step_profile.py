"""What a router learns of a compute's speed from its heartbeats."""

from __future__ import annotations

import pytest

from common.messages.control import Load, StepReport
from services.router.step_profile import StepProfile


def _heard(profile: StepProfile, at_s: float, num_running: int, num_steps: int) -> None:
    profile.heard(Load(num_running, 0, 64, steps=StepReport(num_steps, 0, 0)), at_s)


def test_steps_are_timed_between_two_heartbeats_with_work() -> None:
    profile = StepProfile()
    _heard(profile, 0.0, 4, 100)
    assert profile.step_s(1) == 0.0
    _heard(profile, 0.5, 4, 150)
    assert profile.step_s(1) == profile.step_s(64) == 0.01


def test_a_time_belongs_to_the_number_of_requests() -> None:
    profile = StepProfile()
    for at_s, num_running, num_steps in ((0.0, 1, 0), (0.5, 1, 50), (1.0, 32, 60), (1.5, 32, 70)):
        _heard(profile, at_s, num_running, num_steps)
    assert (profile.step_s(2), profile.step_s(60)) == (0.01, 0.05)


def test_idle_moments_make_a_compute_hardly_slower() -> None:
    profile = StepProfile()
    for at_s, num_running, num_steps in (
        *((0.0, 2, 0), (0.5, 2, 50)),
        *((1.0, 2, 51), (1.5, 0, 51), (2.0, 2, 51), (2.5, 2, 51)),
    ):
        _heard(profile, at_s, num_running, num_steps)
    assert profile.step_s(2) == pytest.approx(0.01 + 0.2 * (0.5 - 0.01))
    _heard(profile, 3.0, 2, 101)
    assert profile.step_s(2) == 0.01


def test_a_worker_without_steps_is_not_measured() -> None:
    profile = StepProfile()
    for at_s in (0.0, 0.5):
        profile.heard(Load(1, 0, 64), at_s)
    assert profile.step_s(1) == 0.0
