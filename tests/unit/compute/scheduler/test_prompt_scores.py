"""Prompts that are scored: every position is computed and told once, in pieces that are small."""

from __future__ import annotations

import pytest

from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import MAX_SCORED_TOKENS
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = tuple(range(2, 26))


def make_loop(max_prefill_tokens: int = 64, **spec: int) -> Loop:
    settings = SchedulerSettings(max_num_seqs=8, max_prefill_tokens=max_prefill_tokens)
    return Loop(make_spec(**spec), settings)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_chunks_of_any_size_tell_the_same(chunk: int) -> None:
    loop = make_loop(chunk)
    loop.add(make_request(0, PROMPT, num_prompt_logprobs=2))
    loop.run()
    loop.check_finished()
    assert len(loop.streams[0].scores) == len(PROMPT) - 1


def test_each_chunk_is_told_as_soon_as_its_result_is_there_and_before_any_token() -> None:
    loop = make_loop(10)
    loop.add(make_request(0, PROMPT, num_prompt_logprobs=0))
    told = []
    for _ in range(3):
        loop.launch()
        loop.collect()
        (event, *later) = loop.hear()
        told.append([event.scored[0].first, len(event.scored[0].logprobs)])
        assert event.opened is (len(told) == 1)
        assert bool(later) is (len(told) == 3)
    assert told == [[1, 10], [11, 10], [21, 3]]


def test_a_prompt_that_others_have_computed_is_computed_again() -> None:
    loop = make_loop()
    for counter, more in enumerate(({}, {"num_prompt_logprobs": 0}, {})):
        loop.add(make_request(counter, PROMPT, **more))
        loop.run()
    loop.check_finished()
    cached = [stream.ending.usage.cached_tokens for stream in loop.streams.values()]
    assert cached == [0, 0, 20]


def test_a_prompt_of_one_token_has_no_scores() -> None:
    loop = make_loop()
    loop.add(make_request(0, (5,), num_prompt_logprobs=1))
    loop.run()
    loop.check_finished()
    assert loop.streams[0].scores == []
    assert not any(plan.scores for plan in loop.plans)


def test_of_several_choices_the_first_is_scored_and_the_others_use_its_pages() -> None:
    loop = make_loop()
    loop.add(make_request(0, PROMPT, num_choices=3, num_prompt_logprobs=1))
    loop.run()
    loop.check_finished()
    assert [len(loop.streams[n].scores) for n in range(3)] == [23, 0, 0]
    assert loop.streams[2].ending.usage.cached_tokens == 20


@pytest.mark.parametrize("num_host_pages", [0, 20])
def test_what_was_told_before_a_preemption_is_not_told_again(num_host_pages: int) -> None:
    loop = make_loop(3, num_pages=9, num_host_pages=num_host_pages)
    loop.add(make_request(0, PROMPT[:8], 20))
    loop.step()
    loop.add(make_request(1, PROMPT[::-1], 3, num_prompt_logprobs=1))
    told = 0
    while not loop.scheduler.stats().preemptions_total:
        assert loop.step()
        told = len(loop.streams[1].scores)
    assert 0 < told < len(PROMPT) - 1
    loop.run()
    loop.check_finished()


def test_scored_prompts_share_the_room_of_a_step_and_others_go_on_beside_them() -> None:
    size = MAX_SCORED_TOKENS + 100
    loop = make_loop(4000, num_pages=1000, max_model_len=2000, max_step_tokens=4008)
    long = tuple(2 + (7 * i) % 30 for i in range(size))
    for counter in range(2):
        loop.add(make_request(counter, long, 2, num_prompt_logprobs=0))
    loop.add(make_request(2, (9, *long), 2))
    loop.run()
    loop.check_finished()
    scored = [plan.q_len[[score.row for score in plan.scores]].tolist() for plan in loop.plans]
    assert scored[:4] == [[512], [100, 412], [200], []]
    assert size + 1 in loop.plans[0].q_len


def test_logits_that_are_not_finite_fail_the_scored_request_alone() -> None:
    loop = make_loop(10)
    loop.device.nonfinite_seeds.add(1)
    loop.add(make_request(0, PROMPT, num_prompt_logprobs=1))
    loop.add(make_request(1, PROMPT, num_prompt_logprobs=1))
    loop.run()
    assert loop.streams[1].ending.failure.code == "nonfinite_logits"
    assert loop.streams[1].scores == []
    assert loop.streams[0].ending.reason == "length"
    loop.check_finished()
