"""Device times are exact among themselves and near the host's clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.compute.runner.cuda.stream import DeviceClock


@dataclass
class Event:
    at_ms: float

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_the_gap_between_two_steps_is_what_the_device_says() -> None:
    clock = DeviceClock()
    _, first_end_s = clock.times_of(Event(0.0), Event(2.0), now_s=10.0, waited=True)
    start_s, end_s = clock.times_of(Event(2.5), Event(4.0), now_s=10.0021, waited=True)
    assert start_s - first_end_s == pytest.approx(0.0005)
    assert end_s - start_s == pytest.approx(0.0015)


def test_a_step_that_the_host_comes_late_to_has_ended_before() -> None:
    clock = DeviceClock()
    clock.times_of(Event(0.0), Event(2.0), now_s=10.0, waited=True)
    _, end_s = clock.times_of(Event(2.0), Event(4.0), now_s=10.5, waited=False)
    assert end_s == pytest.approx(10.002)


def test_no_step_ends_in_the_future() -> None:
    clock = DeviceClock()
    clock.times_of(Event(0.0), Event(2.0), now_s=10.0, waited=True)
    _, end_s = clock.times_of(Event(2.0), Event(4.0), now_s=10.001, waited=True)
    assert end_s == 10.001


def test_a_chain_that_fell_behind_is_caught_up_when_the_host_sees_a_step_end() -> None:
    clock = DeviceClock()
    clock.times_of(Event(0.0), Event(2.0), now_s=10.0, waited=False)
    _, end_s = clock.times_of(Event(2.0), Event(4.0), now_s=10.2, waited=True)
    assert end_s == 10.2
