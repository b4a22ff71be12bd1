"""Samples that draw nothing, since their masks were late, are drawn in a later step."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import DEVICE_TOKEN, StepPlan
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import findable_nodes
from tests.unit.compute.scheduler_loop import Loop, make_request

ALL = frozenset(range(99))
STRUCTURED: dict[str, Any] = {"grammar_spec": GrammarSpec(allowed_token_ids=(3,))}


def make_loop(**spec: int) -> Loop:
    return Loop(make_spec(**spec), SchedulerSettings(in_flight_steps=1))


def launch(loop: Loop, skipped: frozenset[int] = frozenset()) -> StepPlan:
    """Plan a step, take all before it, and run it with these of its structured samples skipped."""
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    while loop.in_flight:
        loop.collect()
    skipped = skipped & set(plan.structured)
    loop.scheduler.reschedule(plan, skipped)
    loop.in_flight.append((plan, loop.device.run(plan, skipped=skipped)))
    return plan


def test_structured_samples_are_numbered_in_the_plan() -> None:
    loop = make_loop()
    loop.add(make_request(0, (2, 3, 4)))
    loop.add(make_request(1, (2, 3, 4), **STRUCTURED))
    assert launch(loop).structured == (1,)
    loop.add(make_request(2, (2, 3, 4), **STRUCTURED))
    plan = launch(loop)
    assert plan.structured == (1, 2)
    assert not len(plan.slots[0].output_ids)
    assert launch(loop).structured == (1, 2)
    loop.run()
    loop.check_finished()


def test_a_prompt_whose_sample_is_void_goes_on_as_a_decode_row_of_its_last_token() -> None:
    loop = make_loop()
    loop.add(make_request(0, prompt=(2, 3, 4, 5, 6), **STRUCTURED))
    first = launch(loop, skipped=ALL)
    assert first.sample_index.tolist() == [0]
    second = launch(loop, skipped=ALL)
    assert second.tokens.tolist() == [DEVICE_TOKEN]
    assert (second.num_decode_rows, second.q_start.tolist()) == (1, [4])
    third = launch(loop)
    assert third.tokens.tolist() == [DEVICE_TOKEN]
    assert third.sample_index.tolist() == [0]
    fourth = launch(loop)
    assert fourth.tokens.tolist() == [DEVICE_TOKEN]
    assert fourth.sample_index.tolist() == [1]
    loop.run()
    loop.hear()
    loop.check_finished()


def test_a_decode_row_that_is_void_decodes_the_token_again_that_the_device_has() -> None:
    loop = make_loop()
    loop.add(make_request(0, **STRUCTURED))
    loop.add(make_request(1))
    launch(loop)
    skipped = launch(loop, skipped=ALL)
    assert skipped.tokens.tolist() == [DEVICE_TOKEN, DEVICE_TOKEN]
    again = launch(loop)
    loop.hear()
    assert again.tokens.tolist() == [DEVICE_TOKEN, DEVICE_TOKEN]
    assert (again.q_start - skipped.q_start).tolist() == [0, 1]
    assert again.sample_index.tolist() == [1, 2]
    loop.run()
    loop.check_finished()


def test_a_page_that_is_written_again_is_not_shared() -> None:
    loop = make_loop()
    loop.add(make_request(0, prompt=tuple(range(2, 10)), **STRUCTURED))  # two pages
    launch(loop, skipped=ALL)
    launch(loop, skipped=ALL)
    assert len(list(findable_nodes(loop.scheduler._state.memory.kinds[0].tree))) == 1
    launch(loop)
    launch(loop)
    assert len(list(findable_nodes(loop.scheduler._state.memory.kinds[0].tree))) == 2
    loop.run()
    loop.check_finished()


def test_followers_do_not_wait_for_their_leaders_mask() -> None:
    loop = make_loop()
    loop.add(make_request(0, prompt=tuple(range(2, 10)), num_choices=3, **STRUCTURED))
    launch(loop, skipped=ALL)
    assert launch(loop, skipped=ALL).num_rows == 3
    loop.run()
    loop.check_finished()


def test_only_the_samples_of_the_one_step_in_flight_can_be_taken_back() -> None:
    loop = make_loop()
    loop.add(make_request(0, **STRUCTURED))
    launch(loop)
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="not the only one in flight"):
        loop.scheduler.reschedule(plan, [0])


def test_a_sample_that_fails_ends_its_sequence_and_no_other() -> None:
    loop = make_loop()
    loop.add(make_request(0, (2, 3, 4), **STRUCTURED))
    loop.add(make_request(1, (2, 3, 4), **STRUCTURED))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    loop.scheduler.fail_samples(plan, {0: Failure(500, "grammar_failed", "No.")})
    assert loop.scheduler.live_samples(plan, [0, 1]) == [1]
    loop.scheduler.reschedule(plan, [0, 1])
    loop.in_flight.append((plan, loop.device.run(plan, skipped=frozenset([0, 1]))))
    loop.run()
    endings = [loop.streams[counter].ending for counter in (0, 1)]
    assert [ending and ending.reason for ending in endings] == ["failed", "length"]
    loop.check_finished()


def test_a_sequence_that_is_taken_back_can_be_preempted_at_once() -> None:
    loop = make_loop(num_pages=10)
    for counter in range(4):
        loop.add(make_request(counter, max_tokens=14, **STRUCTURED))
    for number in range(200):
        if not loop.scheduler.has_work():
            break
        plan = loop.scheduler.plan(0.0)
        while loop.in_flight:
            loop.collect()
        if plan is not None:
            skipped = frozenset(s for s in plan.structured if (s + number) % 2)
            loop.scheduler.reschedule(plan, skipped)
            loop.in_flight.append((plan, loop.device.run(plan, skipped=skipped)))
        loop.hear()
    loop.run()
    assert loop.scheduler.stats().preemptions_total > 0
    loop.check_finished()


def test_a_prompt_of_one_missing_token_can_be_preempted_while_its_void_step_is_in_flight() -> None:
    loop = make_loop(num_pages=7)
    prompt = tuple(range(2, 11))  # two pages and a token
    loop.add(make_request(0, prompt=prompt, max_tokens=1))
    loop.run()
    loop.add(make_request(1, prompt=(20, 21, 22), max_tokens=24))
    for _ in range(13):
        launch(loop)
    loop.add(make_request(2, prompt=prompt, **STRUCTURED))
    plan = launch(loop, skipped=ALL)  # takes the last page; in the next step the older needs one
    assert (plan.q_start.tolist(), plan.q_len.tolist()) == ([15, 8], [1, 1])
    assert launch(loop).num_rows == 1
    assert loop.scheduler.stats().preemptions_total == 1
    loop.run()
    loop.check_finished()
