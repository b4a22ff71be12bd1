"""Pages that several sequences of one step share: computed once, whatever becomes of the first."""

from __future__ import annotations

import pytest

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import StepPlan
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

BROKEN = Failure(500, "engine_step_failed", "The step failed.")
SHARED = tuple(range(2, 14))  # three full pages


def cached_tokens(loop: Loop) -> list[int]:
    """Of every attempt, once it has ended."""
    endings = [stream.ending for stream in loop.streams.values()]
    assert all(ending is not None for ending in endings)
    return [ending.usage.cached_tokens for ending in endings if ending]


def add_three(loop: Loop, **first: object) -> None:
    """Three requests whose prompts begin alike; `first` is what the first one asks for."""
    loop.add(make_request(0, (*SHARED, 20, 21), 4, **first))
    loop.add(make_request(1, (*SHARED, 22, 23), 4))
    loop.add(make_request(2, (*SHARED, 24, 25), 4))


def planned(loop: Loop) -> StepPlan:
    """The next step, not yet launched."""
    plan = loop.plan()
    assert plan is not None
    check_scheduler(loop.scheduler)
    return plan


def run_planned(loop: Loop, plan: StepPlan, skipped: frozenset[int] = frozenset()) -> None:
    """Launch it, and everything else after it."""
    loop.in_flight.append((plan, loop.device.run(plan, skipped=skipped)))
    loop.run()
    loop.check_finished()


def test_a_prefix_that_32_newcomers_share_is_computed_once() -> None:
    spec = make_spec(
        page_tokens=16, num_pages=512, max_num_seqs=32, max_step_tokens=8192, max_model_len=2048
    )
    loop = Loop(spec, SchedulerSettings(max_num_seqs=32))
    shared = tuple(position % 31 + 1 for position in range(1024))
    for counter in range(32):
        loop.add(make_request(counter, (*shared, *(counter % 32,) * 64), 2))
    loop.run()
    loop.check_finished()
    assert loop.plans[0].num_tokens == 1024 + 32 * 64
    assert sum(plan.num_tokens for plan in loop.plans) == 1024 + 32 * 64 + 32
    assert cached_tokens(loop) == [0] + [1024] * 31
    assert loop.scheduler.stats().cached_tokens_total == 31 * 1024


def test_a_newcomer_that_differs_in_its_last_token_alone_is_one_row_of_one_token() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, (*SHARED, 20), 4))
    loop.add(make_request(1, (*SHARED, 21), 4))
    plan = loop.launch()
    assert plan is not None
    assert (plan.num_decode_rows, plan.q_len.tolist()) == (1, [1, 13])
    assert loop.device.num_reads_of_same_step == 1
    loop.run()
    loop.check_finished()


def test_a_chunk_is_shared_as_far_as_it_goes() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_scored_tokens=10))
    loop.add(make_request(0, (*SHARED, 20, 21), 4, num_prompt_logprobs=0))
    loop.add(make_request(1, (*SHARED, 22, 23), 4))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [0, 8]
    assert plan.q_len.tolist() == [10, 6]
    loop.run()
    loop.check_finished()


@pytest.mark.parametrize("differences", [{"cache_salt": "tenant"}, {"prompt": (31, *SHARED[1:])}])
def test_who_has_another_salt_or_another_first_token_shares_nothing(
    differences: dict[str, object],
) -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, SHARED, 4))
    loop.add(make_request(1, **{"prompt": SHARED, "max_tokens": 4, **differences}))  # type: ignore[arg-type]
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [0, 0]
    loop.run()
    loop.check_finished()


def test_without_a_prefix_cache_newcomers_of_one_step_share_nothing() -> None:
    loop = Loop(make_spec(), SchedulerSettings(prefix_cache=False))
    add_three(loop)
    loop.run()
    loop.check_finished()
    assert cached_tokens(loop) == [0, 0, 0]


def test_the_page_of_a_structured_sample_is_not_shared_before_it_is_drawn() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, SHARED, 4, grammar_spec=GrammarSpec(allowed_token_ids=(3,))))
    loop.add(make_request(1, (*SHARED, 20), 4))
    plan = planned(loop)
    assert plan.q_start.tolist() == [0, 8]
    loop.scheduler.reschedule(plan, plan.structured)
    run_planned(loop, plan, skipped=frozenset(plan.structured))


def test_a_page_that_two_have_computed_is_exchanged_only_once_both_are_on_the_device() -> None:
    """A scored prompt computes pages that are there already; it must not write to those."""
    loop = Loop(make_spec())
    loop.add(make_request(0, (*SHARED, 20), 8))
    first = loop.launch()
    assert first is not None
    shared = first.page_id[first.page_slot == 0].tolist()[:3]
    loop.add(make_request(1, (*SHARED, 21), 8, num_prompt_logprobs=0))
    plan = loop.launch()
    assert plan is not None
    own = plan.page_id[plan.page_slot == 1].tolist()
    assert not set(shared) & set(own)
    after = loop.launch() or loop.collect() and loop.launch()
    assert isinstance(after, StepPlan)
    assert after.page_id[after.page_slot == 1].tolist()[:3] == shared
    loop.run()
    loop.check_finished()


def test_a_step_that_is_never_launched_takes_those_along_that_would_have_read_its_pages() -> None:
    loop = Loop(make_spec())
    add_three(loop)
    loop.scheduler.fail_step(planned(loop), BROKEN, 0.0)
    check_scheduler(loop.scheduler)
    assert loop.reasons() == ["failed"] * 3
    loop.add(make_request(3, (*SHARED, 20, 21), 4))  # and nobody finds them any more
    loop.run()
    loop.check_finished()
    assert cached_tokens(loop)[-1] == 0


def test_the_first_may_be_aborted_before_its_step_is_launched() -> None:
    loop = Loop(make_spec())
    add_three(loop)
    plan = planned(loop)
    loop.abort(0)
    check_scheduler(loop.scheduler)
    run_planned(loop, plan)
    assert loop.reasons() == ["aborted", "length", "length"]


def test_the_first_may_fail_alone_at_its_settings() -> None:
    """Its row is computed all the same, without them."""
    loop = Loop(make_spec())
    add_three(loop, num_choices=1)
    plan = planned(loop)
    ended = loop.scheduler.fail_slots({plan.slots[0].slot}, BROKEN)
    assert [attempt.counter for attempt in ended] == [0]
    check_scheduler(loop.scheduler)
    run_planned(loop, plan.without_settings({plan.slots[0].slot}))
    assert loop.reasons() == ["failed", "length", "length"]


def test_choices_go_on_without_the_first_whose_settings_were_not_taken() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, (*SHARED, 20, 21), 4, num_choices=3))
    plan = planned(loop)
    loop.scheduler.fail_slots({plan.slots[0].slot}, BROKEN)
    run_planned(loop, plan.without_settings({plan.slots[0].slot}))
    assert loop.reasons() == ["failed", "length", "length"]


def test_logits_of_the_first_that_are_not_finite_are_nobody_elses() -> None:
    loop = Loop(make_spec())
    loop.device.nonfinite_seeds.add(0)
    add_three(loop)
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["failed", "length", "length"]
    loop.add(make_request(3, (*SHARED, 26, 27), 4))
    loop.run()
    assert cached_tokens(loop) == [0, 12, 12, 0], "what is below the broken row is not found again"


def test_the_head_of_the_line_starts_when_pages_that_it_needs_have_become_shared() -> None:
    """41 pages; the second needs 25, and 16 are free until the first has shared nine."""
    loop = Loop(make_spec(num_pages=41), SchedulerSettings(max_scored_tokens=8))
    prompt = tuple(position % 30 + 2 for position in range(100))
    loop.add(make_request(0, prompt, 40, num_prompt_logprobs=0))
    loop.add(make_request(1, prompt, 8))
    loop.add(make_request(2, (30, 31), 2))  # and who stands behind it starts, too
    steps = 0
    while loop.scheduler.stats().num_running < 2:
        assert loop.step()
        steps += 1
    assert steps == 5, "in each of them 8 tokens become shared"
    loop.step()
    assert loop.scheduler.stats().num_running == 3
    assert loop.streams[0].ending is None
    loop.run()
    loop.check_finished()


def test_two_of_one_prompt_run_together_where_its_pages_fit_only_once() -> None:
    loop = Loop(make_spec(num_pages=40))
    prompt = tuple(position % 30 + 2 for position in range(100))
    loop.add(make_request(0, prompt, 40))
    loop.add(make_request(1, prompt, 8))
    for _ in range(2):  # of 64 tokens at most
        loop.step()
    assert loop.scheduler.stats().num_running == 2
    loop.run()
    loop.check_finished()
