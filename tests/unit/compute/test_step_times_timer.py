"""Planning as late as the device allows, and never later."""

from __future__ import annotations

import pytest

from services.compute.step_times import MARGIN_S, StepTimer, step_kind

DECODE = step_kind(64, 0)


def test_a_kind_of_step_not_seen_before_is_not_waited_for() -> None:
    timer = StepTimer()
    assert timer.launch_at_s(DECODE, launched_s=10.0) < 10.0


def test_the_next_step_is_planned_a_hosts_time_before_the_end() -> None:
    timer = StepTimer()
    timer.host_took(0.002)
    timer.ended(DECODE, launched_s=0.0, end_s=0.005)
    assert timer.launch_at_s(DECODE, launched_s=0.003) == pytest.approx(0.01 - 0.002 - MARGIN_S)


def test_a_sampling_is_due_the_hosts_usual_time_before_the_end() -> None:
    timer = StepTimer()
    timer.ended(DECODE, launched_s=0.0, end_s=0.005)
    for number in range(100):
        timer.host_took(0.001 if number % 10 else 0.002)
        timer.sampling_took(0.0005)
    due_s = timer.sample_at_s(DECODE, launched_s=0.005)
    assert due_s == pytest.approx(0.010 - 0.0011 - 0.0005, abs=0.0001)
    assert due_s > timer.launch_at_s(DECODE, launched_s=0.005) + MARGIN_S


def test_a_step_behind_another_starts_when_that_one_ends() -> None:
    timer = StepTimer()
    timer.ended(DECODE, launched_s=0.0, end_s=0.005)
    timer.ended(DECODE, launched_s=0.003, end_s=0.010)
    assert timer.end_s(DECODE, launched_s=0.008) == pytest.approx(0.015)


def test_durations_fall_at_once_and_rise_slowly() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.010)
    timer.ended(DECODE, 0.010, 0.014)
    assert timer.end_s(DECODE, 1.0) == pytest.approx(1.004)
    timer.ended(DECODE, 2.0, 2.014)
    assert timer.end_s(DECODE, 3.0) == pytest.approx(3.006)


def test_a_wait_for_the_sampling_is_not_taken_for_the_devices_time() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.005)
    timer.ended(DECODE, 1.0, 1.3, sampled_s=1.3)
    assert timer.end_s(DECODE, 2.0) == pytest.approx(2.005)


def test_sampling_that_comes_too_late_makes_the_prediction_earlier() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.050)  # of which it was 5 ms in truth
    for number in range(1, 40):
        sampled_s = max(timer.launch_at_s(DECODE, number), number + 0.001)
        timer.ended(DECODE, number, max(number + 0.005, sampled_s), sampled_s)
    assert timer.end_s(DECODE, 100.0) == pytest.approx(100.005, abs=0.0015)


def test_a_step_that_waits_for_every_sampling_is_not_taken_for_shorter_than_it_is() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.005)
    for number in range(1, 40):
        timer.ended(DECODE, number, number + 0.0052, sampled_s=number + 0.005)
    assert timer.step_s(DECODE) == pytest.approx(0.005)


def test_sampling_in_good_time_teaches_as_usual() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.005)
    timer.ended(DECODE, 1.0, 1.010, sampled_s=1.002)
    assert timer.end_s(DECODE, 2.0) == pytest.approx(2.006)


def test_a_first_step_that_waited_teaches_nothing() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.3, sampled_s=0.3)
    assert timer.end_s(DECODE, 1.0) == 1.0
    timer.ended(DECODE, 1.0, 1.005)
    assert timer.end_s(DECODE, 2.0) == pytest.approx(2.005)


def test_a_slow_host_is_remembered_for_a_while() -> None:
    timer = StepTimer()
    timer.ended(DECODE, 0.0, 0.010)
    timer.host_took(0.004)
    timer.host_took(0.001)
    early = timer.end_s(DECODE, 1.0) - timer.launch_at_s(DECODE, 1.0)
    assert 0.0035 < early < 0.0045


def test_steps_of_like_size_are_one_kind() -> None:
    assert step_kind(65, 0) == step_kind(127, 0)
    assert step_kind(64, 0) != step_kind(64, 1)
