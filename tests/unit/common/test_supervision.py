"""A process that dies is started again ever later, until it has lived for a minute."""

from __future__ import annotations

from common.supervision import HEALTHY_AFTER_S, LONGEST_DELAY_S, RestartPolicy


def test_each_death_in_a_row_doubles_the_wait_up_to_half_a_minute() -> None:
    policy, delays, now_s = RestartPolicy(), [], 0.0
    for _ in range(9):
        policy.started(now_s)
        now_s += 1.0
        delays.append(policy.died(now_s))
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert policy.num_deaths == 9


def test_a_healthy_minute_is_a_new_beginning() -> None:
    policy = RestartPolicy()
    for _ in range(20):
        policy.started(0.0)
        assert policy.died(HEALTHY_AFTER_S - 0.1) <= LONGEST_DELAY_S
    policy.started(0.0)
    assert policy.died(HEALTHY_AFTER_S) == 0.5
    assert policy.num_deaths == 1
