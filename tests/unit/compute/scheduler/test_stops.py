"""How sequences end by themselves."""

from __future__ import annotations

import pytest

from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import EOS, generate
from tests.unit.compute.memory_check import check_scheduler, findable_nodes
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = (2, 3, 4, 5, 6)


def seed_that_stops(stop: int, low: int, high: int) -> int:
    """A seed whose output has `stop` for the first time between two indices."""
    for seed in range(10_000):
        request = make_request(0, PROMPT, 40, seed=seed, stop_token_ids=(stop,))
        if low <= len(generate(PROMPT, request.sampling, 0)) - 1 <= high:
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_step_is_planned_beyond_max_tokens(max_tokens: int) -> None:
    loop = Loop(make_spec(), SchedulerSettings(in_flight_steps=2))
    loop.add(make_request(0, PROMPT, max_tokens))
    loop.run()
    loop.check_finished()
    assert len(loop.plans) == max_tokens
    ending = loop.streams[0].ending
    assert ending is not None
    assert (ending.reason, ending.stop) == ("length", None)


def test_a_request_may_fill_the_model_length_to_the_last_token() -> None:
    loop = Loop(make_spec(max_model_len=16))
    loop.add(make_request(0, PROMPT, 11))
    loop.run()
    loop.check_finished()
    assert max(int(plan.pos_upper.max()) for plan in loop.plans) == 15


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_tokens_launched_after_a_late_eos_are_discarded(depth: int) -> None:
    loop = Loop(make_spec(), SchedulerSettings(in_flight_steps=depth))
    seed = seed_that_stops(EOS, 4, 20)
    loop.add(make_request(0, PROMPT, 40, seed=seed, ignore_eos=False))
    loop.run()
    loop.check_finished()
    stream = loop.streams[0]
    assert stream.tokens[-1] == EOS
    assert len(loop.plans) == len(stream.tokens) + depth
    assert stream.ending is not None
    assert (stream.ending.reason, stream.ending.stop) == ("stop", None)


def test_a_stop_token_of_the_request_is_named_in_its_ending() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 40, seed=seed_that_stops(9, 2, 20), stop_token_ids=(9,)))
    loop.run()
    loop.check_finished()
    ending = loop.streams[0].ending
    assert ending is not None
    assert (ending.reason, ending.stop) == ("stop", 9)


def test_the_stop_token_counts_as_a_completion_token() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 40, seed=seed_that_stops(9, 2, 20), stop_token_ids=(9,)))
    loop.run()
    stream = loop.streams[0]
    assert stream.ending is not None
    assert stream.tokens[-1] == 9
    assert stream.ending.usage.completion_tokens == len(stream.tokens)


def test_eos_is_a_token_like_any_other_when_it_is_ignored() -> None:
    loop = Loop(make_spec())
    seed = seed_that_stops(EOS, 2, 10)
    loop.add(make_request(0, PROMPT, 20, seed=seed, ignore_eos=True))
    loop.run()
    assert EOS in loop.streams[0].tokens
    assert len(loop.streams[0].tokens) == 20


def test_pages_with_discarded_tokens_are_never_shared() -> None:
    # 5 + 3 known tokens when EOS is seen: its page is full of tokens, but only 7 positions have a
    # committed result, and the discarded token's position would be in the next page.
    loop = Loop(make_spec(), SchedulerSettings(in_flight_steps=2))
    seed = seed_that_stops(EOS, 2, 2)
    loop.add(make_request(0, PROMPT, 40, seed=seed, ignore_eos=False))
    loop.run()
    shared = list(findable_nodes(loop.scheduler._state.memory.kinds[0].tree))
    assert len(shared) == 1
    check_scheduler(loop.scheduler)


def test_pages_of_a_late_eos_can_be_taken_by_the_next_plan() -> None:
    loop = Loop(make_spec(num_pages=6), SchedulerSettings(prefix_cache=False))
    seed = seed_that_stops(EOS, 5, 12)
    loop.add(make_request(0, PROMPT, 19, seed=seed, ignore_eos=False))
    loop.add(make_request(1, tuple(range(2, 22)), 5))
    loop.run()
    loop.check_finished()


def test_min_tokens_keep_stop_tokens_away() -> None:
    loop = Loop(make_spec())
    seed = seed_that_stops(9, 0, 3)
    loop.add(make_request(0, PROMPT, 40, seed=seed, stop_token_ids=(9,), min_tokens=10))
    loop.run()
    loop.check_finished()
    assert len(loop.streams[0].tokens) >= 10
