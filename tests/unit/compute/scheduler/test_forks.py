"""Several choices of one request share the pages of its prompt."""

from __future__ import annotations

from services.compute.scheduler.settings import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = tuple(range(2, 16))  # three full pages and a tail of two


def test_choices_wait_for_the_prompt_of_the_first_and_recompute_only_its_tail() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 4, num_choices=3))
    first, second = loop.launch(), loop.launch()
    assert first is not None
    assert second is not None
    assert first.q_len.tolist() == [14]
    assert second.q_len.tolist() == [1, 2, 2]
    assert second.q_start.tolist() == [14, 12, 12]
    check_scheduler(loop.scheduler)
    assert loop.scheduler.stats().pages_free == 64 - 3 - 3, "the full pages are there once"
    loop.run()
    loop.check_finished()


def test_choices_wait_through_all_chunks_of_the_prompt() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=5))
    loop.add(make_request(0, PROMPT, 4, num_choices=2))
    shapes = [plan.q_len.tolist() for _ in range(4) if (plan := loop.launch()) and loop.collect()]
    assert shapes == [[5], [5], [4], [1, 2]]
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
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 4, num_choices=3))
    loop.add(make_request(3, (20, 21, 22), 4))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [14, 3]
    loop.run()
    loop.check_finished()


def test_choices_share_their_prompt_without_a_prefix_cache_too() -> None:
    loop = Loop(make_spec(), SchedulerSettings(prefix_cache=False))
    loop.add(make_request(0, PROMPT, 4, num_choices=2))
    loop.launch()
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [14, 12]
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
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 4, num_choices=3))
    loop.launch()
    assert loop.scheduler.stats().num_waiting == 2
    assert loop.scheduler.open_attempts("router") == [0, 1, 2]
    loop.run()
