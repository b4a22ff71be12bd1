"""Pages run out: rows are held, then the youngest is preempted, and no token is ever lost."""

from __future__ import annotations

import pytest

from services.compute.kv.transfer import Direction
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

OLD, YOUNG = tuple(range(2, 15)), tuple(range(12, 25))


def two_that_do_not_fit(num_host_pages: int = 0, **changes: int) -> Loop:
    """Two sequences of 33 tokens each, in a memory of 40."""
    loop = Loop(make_spec(num_pages=10, num_host_pages=num_host_pages, **changes))
    loop.add(make_request(0, OLD, 20))
    loop.add(make_request(1, YOUNG, 20))
    return loop


def step_until_preempted(loop: Loop) -> None:
    """Turn until somebody had to go."""
    while not loop.scheduler.stats().preemptions_total:
        assert loop.step()
        check_scheduler(loop.scheduler)


def test_the_youngest_is_preempted_and_loses_no_token() -> None:
    loop = two_that_do_not_fit()
    step_until_preempted(loop)
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    loop.check_finished()
    assert [len(stream.tokens) for stream in loop.streams.values()] == [20, 20]


def test_the_lowest_priority_is_preempted_before_the_latest_arrival() -> None:
    loop = Loop(make_spec(num_pages=10))
    loop.add(make_request(0, OLD, 20, priority=1))
    loop.add(make_request(1, YOUNG, 20))
    step_until_preempted(loop)
    loop.run()
    loop.check_finished()
    assert loop.plans[-1].q_start.tolist() == [31], "the less important one ends last"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_rows_are_held_until_nothing_of_the_victim_is_in_flight(depth: int) -> None:
    loop = Loop(
        make_spec(num_pages=10), SchedulerSettings(in_flight_steps=depth, prefix_cache=False)
    )
    loop.add(make_request(0, OLD, 20))
    loop.add(make_request(1, YOUNG, 20))
    step_until_preempted(loop)
    heard = sum(len(stream.tokens) for stream in loop.streams.values())
    sampled = sum(len(plan.sample_row) for plan in loop.plans)
    assert sampled - heard <= len(loop.in_flight), "a sampled token is known or in flight"
    loop.run()
    loop.check_finished()
    # One sample each of 40 tokens: none was discarded and sampled again.
    assert sum(len(plan.sample_row) for plan in loop.plans) == 40


def test_nobody_is_preempted_if_the_commit_in_flight_frees_enough() -> None:
    loop = Loop(make_spec(num_pages=8), SchedulerSettings(prefix_cache=False))
    loop.add(make_request(0, OLD, 14))  # 26 positions: 7 pages at the end
    loop.add(make_request(1, (9, 9), 2))  # ends in time
    loop.run()
    loop.check_finished()
    assert loop.scheduler.stats().preemptions_total == 0


def test_a_held_row_goes_on_in_the_next_step_when_pages_come_free() -> None:
    loop = Loop(make_spec(num_pages=10), SchedulerSettings(prefix_cache=False))
    loop.add(make_request(0, OLD, 20))
    loop.add(make_request(1, YOUNG, 20))
    while loop.launch() is not None:
        if len(loop.in_flight) > 1:
            loop.collect()
    loop.hear()
    assert loop.scheduler.stats().num_running == 2, "both rows are held, nobody is preempted yet"
    loop.abort(0)
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [1]
    loop.run()
    loop.check_finished()
    assert loop.scheduler.stats().preemptions_total == 0


def test_the_victim_is_held_even_if_it_has_room_itself() -> None:
    loop = Loop(make_spec(num_pages=7), SchedulerSettings(prefix_cache=False))
    loop.add(make_request(0, tuple(range(2, 14)), 8))  # wants a page for its first token
    loop.add(make_request(1, tuple(range(12, 25)), 8))  # has room for three more
    assert loop.launch() is not None
    assert loop.launch() is None, "both are held while the victim is in flight"
    loop.collect()
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [12]
    assert loop.scheduler.stats().preemptions_total == 1
    loop.run()
    loop.check_finished()


def test_newcomers_wait_while_pages_are_short() -> None:
    loop = two_that_do_not_fit()
    while loop.launch() is not None:
        if len(loop.in_flight) > 1:
            loop.collect()
    loop.add(make_request(2, (2,), 2))
    assert loop.launch() is None, "there is a slot, and a page would do, but two rows are held"
    loop.run()
    loop.check_finished()


def test_a_recompute_finds_the_pages_that_nobody_needed_yet() -> None:
    loop = two_that_do_not_fit()
    step_until_preempted(loop)
    loop.run()
    resumed = [plan for plan in loop.plans if plan.slots][-1]
    assert resumed.q_start.tolist()[-1] > 0
    assert loop.scheduler.stats().prompt_tokens_total == len(OLD) + len(YOUNG), "counted once"


def test_with_swap_space_the_victim_comes_back_without_computing_anything_again() -> None:
    loop = two_that_do_not_fit(num_host_pages=10)
    step_until_preempted(loop)
    assert loop.scheduler.stats().num_swapped == 1
    loop.run()
    loop.check_finished()
    assert loop.num_moved(Direction.TO_HOST)
    resumed = [plan for plan in loop.plans if plan.slots][-1]
    assert resumed.q_len.tolist() == [1]
    assert resumed.num_decode_rows == 1
    computed = sum(plan.num_tokens for plan in loop.plans)
    assert computed == 2 * (len(OLD) + 19), "every position was computed exactly once"


def test_a_victim_that_does_not_fit_into_swap_space_recomputes() -> None:
    loop = two_that_do_not_fit(num_host_pages=2)
    step_until_preempted(loop)
    assert loop.scheduler.stats().num_swapped == 0
    loop.run()
    loop.check_finished()


def test_a_swap_brings_back_only_what_the_prefix_tree_has_lost() -> None:
    loop = two_that_do_not_fit(num_host_pages=10)
    step_until_preempted(loop)
    loop.run()
    assert 0 < loop.num_moved(Direction.TO_DEVICE) <= loop.num_moved(Direction.TO_HOST)
    loop.check_finished()


def test_a_request_that_needs_all_the_memory_runs_when_it_is_alone() -> None:
    loop = Loop(make_spec(num_pages=8))
    loop.add(make_request(0, (7, 8, 9), 20))
    loop.add(make_request(1, tuple(range(2, 22)), 13))  # 32 positions: every page there is
    loop.add(make_request(2, (9, 8, 7), 20))
    loop.run()
    loop.check_finished()
    assert [len(stream.tokens) for stream in loop.streams.values()] == [20, 13, 20]
