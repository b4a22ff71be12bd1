"""Several choices of one request share the pages of its prompt."""

from __future__ import annotations

from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = tuple(range(2, 16))  # three full pages and a tail of two


def test_choices_join_in_the_step_of_the_first_and_compute_only_the_tail_of_its_prompt() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 4, num_choices=3))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [14, 2, 2]
    assert plan.q_start.tolist() == [0, 12, 12]
    check_scheduler(loop.scheduler)
    assert loop.scheduler.stats().pages_free == 64 - 3 - 3, "the full pages are there once"
    loop.run()
    loop.check_finished()
    endings = [stream.ending for stream in loop.streams.values()]
    assert [ending and ending.usage.cached_tokens for ending in endings] == [0, 12, 12]


def test_choices_wait_through_all_chunks_of_the_prompt() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=5))
    loop.add(make_request(0, PROMPT, 4, num_choices=2))
    shapes = [plan.q_len.tolist() for _ in range(4) if (plan := loop.launch()) and loop.collect()]
    assert shapes == [[5], [5], [4, 1], [1, 1]]
    loop.run()
    loop.check_finished()


def test_each_choice_has_its_own_noise_and_its_own_events() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 12, num_choices=3, first_choice=2))
    loop.run()
    loop.check_finished()
    spoken = {tuple(stream.tokens) for stream in loop.streams.values()}
    assert len(spoken) == 3


def test_others_are_admitted_while_choices_wait_for_their_leader() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_scored_tokens=6))
    loop.add(make_request(0, PROMPT, 4, num_choices=3, num_prompt_logprobs=0))
    loop.add(make_request(3, (20, 21, 22), 4))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [6, 3]
    loop.run()
    loop.check_finished()


def test_choices_share_their_prompt_without_a_prefix_cache_too() -> None:
    loop = Loop(make_spec(), SchedulerSettings(prefix_cache=False))
    loop.add(make_request(0, PROMPT, 4, num_choices=2))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [0, 12]
    loop.run()
    loop.check_finished()


def test_a_leader_that_is_preempted_in_its_prompt_is_still_waited_for() -> None:
    loop = Loop(
        make_spec(num_pages=12), SchedulerSettings(max_prefill_tokens=4, prefix_cache=False)
    )
    loop.add(make_request(0, (2, 3), 30))
    for _ in range(7):
        loop.step()
    loop.add(make_request(1, tuple(range(2, 30)), 4, num_choices=2))
    loop.run()
    loop.check_finished()


def test_parked_choices_count_as_waiting() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=13))
    loop.add(make_request(0, PROMPT, 4, num_choices=3))
    loop.launch()
    assert loop.scheduler.stats().num_waiting == 2
    assert loop.scheduler.open_attempts("router") == [0, 1, 2]
    loop.run()
