"""When a replica counts as ill, and when as well again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.compute.replica_health import (
    MIN_NONFINITE,
    MIN_SLOW_STEPS,
    SLOW_RATIO,
    SLOW_S,
    WINDOW_S,
    ReplicaHealth,
    StepKind,
    work_of,
)
from services.compute.step import int32_array
from tests.unit.compute.step_plans import decode_plan

DECODE: StepKind = (4, 0, 12)
LONG: StepKind = (4, 0, 17)


def learned(took_s: float = 0.2) -> ReplicaHealth:
    """Health with steps that took so long, none of them ever slow."""
    health = ReplicaHealth()
    for _ in range(100):
        health.step_took(DECODE, took_s, 0.0)
    return health


def test_a_few_requests_are_their_own_fault_and_a_quarter_of_all_the_replicas() -> None:
    for num_served, is_ill in ((4 * MIN_NONFINITE, True), (4 * MIN_NONFINITE + 1, False)):
        health = ReplicaHealth()
        health.served(0, 0, 0, 0.0)
        health.served(num_served, MIN_NONFINITE - 1, 1, 1.0)
        assert not health.trouble(1.0)
        health.served(num_served, MIN_NONFINITE, 1, 2.0)
        assert bool(health.trouble(2.0)) is is_ill
    assert "3 of 12 requests" in _ill_of(3, 12).trouble(2.0)


def _ill_of(num_wrong: int, num_served: int) -> ReplicaHealth:
    health = ReplicaHealth()
    health.served(100, 0, 0, 1.0)
    health.served(100 + num_served, num_wrong, 0, 2.0)
    return health


def test_streams_that_run_for_long_count_as_served() -> None:
    health = ReplicaHealth()
    health.served(100, 0, 100, 0.0)
    health.served(100 + MIN_NONFINITE, MIN_NONFINITE, 100, 1.0)
    assert not health.trouble(1.0)


def test_what_was_long_ago_is_not_counted() -> None:
    health = ReplicaHealth()
    for number in range(100):  # one in a while
        health.served(number, number, 1, number * (WINDOW_S / 2 + 1.0))
        assert not health.trouble(number * (WINDOW_S / 2 + 1.0))


def test_it_is_well_again_a_window_after_the_last_wrong_answer() -> None:
    health = _ill_of(4, 4)
    health.served(110, 5, 0, 10.0)
    assert "5 of 10 requests" in health.trouble(10.0)
    assert health.trouble(10.0 + WINDOW_S - 0.1)
    assert not health.trouble(10.0 + WINDOW_S)
    for second in range(11, 300):
        health.served(110 + second, 5, 0, float(second))
    assert not health.trouble(300.0)


def test_after_a_long_silence_nothing_is_counted_a_second_time() -> None:
    health = ReplicaHealth()
    health.served(0, 0, 0, 0.0)
    health.served(8, MIN_NONFINITE - 1, 0, 1.0)
    late_s = 10 * WINDOW_S  # as of a replica without a router for so long
    health.served(9, MIN_NONFINITE, 1, late_s)
    assert not health.trouble(late_s)
    health.served(9 + MIN_NONFINITE, 2 * MIN_NONFINITE, 1, late_s + 1.0)
    assert health.trouble(late_s + 1.0)


def test_single_slow_steps_are_no_illness_and_several_are() -> None:
    health, now_s = learned(), 100.0
    for _ in range(MIN_SLOW_STEPS - 1):
        health.step_took(DECODE, 5.0, now_s)
    for _ in range(10):
        now_s += WINDOW_S + 1.0
        health.step_took(DECODE, 5.0, now_s)
        assert not health.trouble(now_s)
    for number in range(1, MIN_SLOW_STEPS):
        health.step_took(DECODE, 5.0, now_s + number)
    assert health.trouble(now_s + 2.0) == "a step took 5.0 s; 0.2 s were expected"


def test_a_replica_that_stays_slow_stays_ill_and_one_that_recovers_does_not() -> None:
    health, now_s = learned(), 100.0
    for _ in range(200):
        now_s += 3.0
        health.step_took(DECODE, 0.2 * SLOW_RATIO, now_s)
    assert health.trouble(now_s)
    for _ in range(10):
        now_s += 3.0
        health.step_took(DECODE, 0.25, now_s)
    assert not health.trouble(now_s)


def test_a_short_step_may_take_ten_times_as_long() -> None:
    health = learned(0.005)
    for _ in range(10):
        health.step_took(DECODE, 0.99 * SLOW_S, 1.0)
    assert not health.trouble(1.0)


def test_a_kind_of_step_that_was_never_seen_is_not_judged() -> None:
    health = learned(0.2)
    for _ in range(10):
        health.step_took(LONG, 20.0, 1.0)
    assert not health.trouble(1.0)


def test_a_busy_machine_is_no_illness() -> None:
    health, random = learned(0.5), np.random.default_rng(1)
    for number in range(5000):
        factor = float(np.exp(random.uniform(0.0, np.log(6.0))))  # up to six times as long
        health.step_took(DECODE, 0.5 * factor, float(number))
        assert not health.trouble(float(number))


def test_a_long_context_is_another_kind_of_step() -> None:
    plan = decode_plan((0, 0, 1))
    short, long = (replace(plan, pos_upper=int32_array((end,))) for end in (100, 100_000))
    assert work_of(short)[:2] == work_of(long)[:2]
    assert work_of(long)[2] - work_of(short)[2] >= 9
