"""Embeddings: a prompt runs, ends with its last chunk, and nothing is sampled."""

from __future__ import annotations

import pytest

from common.messages.failure import Failure
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = tuple(range(2, 26))


def make_loop(pooling: str, max_prefill_tokens: int = 64, **spec: int) -> Loop:
    settings = SchedulerSettings(max_num_seqs=8, max_prefill_tokens=max_prefill_tokens)
    return Loop(make_spec(pooling, **spec), settings)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("chunk", [1, 7, 24, 64])
def test_a_prompt_ends_with_its_embedding_and_no_token(pooling: str, chunk: int) -> None:
    loop = make_loop(pooling, chunk)
    for counter in range(3):
        prompt = PROMPT[: 8 * (counter + 1)]
        loop.add(make_request(counter, prompt, 0, pooling=True))
    loop.run()
    loop.check_finished()
    for stream in loop.streams.values():
        assert stream.ending.reason == "stop"
        assert stream.ending.usage.completion_tokens == 0
    assert not any(len(plan.sample_row) for plan in loop.plans)


@pytest.mark.parametrize(("pooling", "cached"), [("last", 20), ("mean", 0), ("cls", 0)])
def test_a_prefix_is_used_where_the_last_position_is_enough(pooling: str, cached: int) -> None:
    loop = make_loop(pooling)
    for counter in range(2):
        loop.add(make_request(counter, PROMPT, 1, pooling=True))
        loop.run()
    loop.add(make_request(2, PROMPT))
    loop.run()
    loop.check_finished()
    assert loop.streams[1].ending.usage.cached_tokens == cached
    assert loop.streams[2].ending.usage.cached_tokens == 20  # what it computed serves others


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("num_host_pages", [0, 20])
def test_a_preempted_one_begins_its_sum_again(pooling: str, num_host_pages: int) -> None:
    loop = make_loop(pooling, 3, num_pages=9, num_host_pages=num_host_pages)
    loop.add(make_request(0, PROMPT[:8], 20))
    loop.step()
    loop.add(make_request(1, PROMPT[::-1], 1, pooling=True))
    loop.run()
    assert loop.scheduler.stats().preemptions_total > 0
    assert loop.device.num_swapped_out == 0 or pooling == "last"
    loop.check_finished()


def test_an_aborted_one_ends_once_though_its_result_still_comes() -> None:
    loop = make_loop("mean")
    loop.add(make_request(0, PROMPT, 1, pooling=True))
    loop.launch()
    assert loop.abort(0)
    loop.run()
    loop.check_finished()
    assert loop.streams[0].ending.reason == "aborted"


def test_nothing_is_planned_while_a_result_is_awaited() -> None:
    loop = make_loop("mean")
    loop.add(make_request(0, PROMPT, 1, pooling=True))
    assert loop.launch() is not None
    assert loop.launch() is None
    loop.run()
    loop.check_finished()


def test_one_that_is_not_finite_fails_alone() -> None:
    loop = make_loop("last")
    loop.device.nonfinite_seeds.add(0)
    for counter in range(2):
        loop.add(make_request(counter, PROMPT, 1, pooling=True))
    loop.run()
    assert loop.streams[0].ending.failure.code == "nonfinite_logits"
    assert loop.streams[1].ending.reason == "stop"
    loop.check_finished()


def refusal(loop: Loop, **more: object) -> Failure:
    loop.add(make_request(0, **{"prompt": PROMPT, "pooling": True, **more}))
    loop.hear()
    failure = loop.streams[0].ending.failure
    assert failure is not None
    return failure


def test_a_model_that_is_not_made_for_it_says_so() -> None:
    failure = refusal(make_loop(""))
    assert (failure.status, failure.code, failure.field) == (400, "unsupported_model", "model")
    assert "embedding" in failure.message


def test_a_model_without_a_head_generates_nothing() -> None:
    loop = make_loop("last", generates=False)
    failure = refusal(loop, pooling=False)
    assert (failure.status, failure.code, failure.field) == (400, "unsupported_model", "model")
    loop.add(make_request(5, PROMPT, 0, pooling=True))
    loop.run()
    assert loop.streams[5].ending.reason == "stop"


def test_a_text_has_one_embedding_and_may_fill_the_model() -> None:
    loop = make_loop("last", max_model_len=24)
    assert refusal(loop, num_choices=2).code == "internal_error"
    assert refusal(loop, prompt=(1, *PROMPT)).code == "context_length_exceeded"
    loop.add(make_request(7, PROMPT, 0, pooling=True))
    loop.run()
    assert loop.streams[7].ending.reason == "stop"


def test_a_prompts_last_token_gets_a_page_of_a_window_for_itself() -> None:
    loop = Loop(
        make_spec("last", windows=(8,)), SchedulerSettings(max_prefill_tokens=4, max_num_seqs=2)
    )
    loop.add(make_request(0, tuple(range(2, 15)), 0, pooling=True))
    loop.run(max_steps=20)
    loop.check_finished()
