"""What a step holds: chunks beside decode rows, budgets, tokens that only the device has."""

from __future__ import annotations

import pytest

from services.compute.scheduler.outputs import SequenceOutput, StepTokens
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import DEVICE_TOKEN
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.scheduler_loop import Loop, make_request


def test_a_request_alone_gives_the_tokens_it_must() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, max_tokens=20))
    loop.run()
    loop.check_finished()
    assert len(loop.streams[0].tokens) == 20


def test_a_long_prompt_is_computed_in_chunks_beside_the_decode_rows() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=6))
    loop.add(make_request(0, max_tokens=30))
    loop.step()
    loop.add(make_request(1, tuple(range(12, 27)), max_tokens=4))
    shapes = []
    for _ in range(4):
        plan = loop.launch()
        assert plan is not None
        shapes.append((plan.num_decode_rows, plan.q_len.tolist(), len(plan.sample_row)))
        loop.collect()
    assert shapes == [(1, [1, 6], 1), (1, [1, 6], 1), (1, [1, 3], 2), (2, [1, 1], 2)]
    loop.run()
    loop.check_finished()


def test_several_prompts_share_the_budget_of_one_step() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=12))
    for counter in range(3):
        loop.add(make_request(counter, tuple(range(counter + 2, counter + 7)), max_tokens=2))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [5, 5, 2]
    assert plan.sample_row.tolist() == [0, 1]


def test_decode_rows_leave_less_of_the_step_to_prompts() -> None:
    loop = Loop(make_spec(max_step_tokens=8, max_num_seqs=4))
    for counter in range(3):
        loop.add(make_request(counter, (2,), max_tokens=30))
    loop.step()
    loop.add(make_request(3, tuple(range(2, 22)), max_tokens=2))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [1, 1, 1, 5]


def test_the_first_output_says_how_long_its_sequence_waited() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    waits: dict[int, float | None] = {}
    for counter in range(2):
        loop.add(make_request(counter, max_tokens=4))
    while loop.scheduler.has_work():
        loop.now_s += 1.0
        loop.launch()
        loop.collect()
        for output in loop.hear():
            if output.opened:
                waits[output.attempt.counter] = output.queued_s
    assert waits == {0: 1.0, 1: 5.0}


def test_no_more_sequences_run_than_there_are_slots() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=2))
    for counter in range(5):
        loop.add(make_request(counter, max_tokens=3))
    loop.launch()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    loop.run()
    loop.check_finished()


def test_the_device_has_the_token_of_a_decode_row_whether_it_is_in_flight_or_known() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0))
    loop.launch()
    ahead = loop.launch()
    assert ahead is not None
    assert ahead.tokens.tolist() == [DEVICE_TOKEN]
    loop.collect()
    loop.collect()
    known = loop.launch()
    assert known is not None
    assert known.tokens.tolist() == [DEVICE_TOKEN]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_step_is_planned_beyond_the_depth(depth: int) -> None:
    loop = Loop(make_spec(), SchedulerSettings(in_flight_steps=depth))
    loop.add(make_request(0))
    for _ in range(depth + 1):
        assert loop.launch() is not None
    assert loop.launch() is None
    loop.collect()
    assert loop.launch() is not None


def test_rows_say_where_they_start_and_which_output_they_sample() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, (2, 3, 4, 5, 6), max_tokens=9))
    plans = []
    for _ in range(3):
        plans.append(loop.launch())
        loop.collect()
    assert [plan and plan.q_start.tolist() for plan in plans] == [[0], [5], [6]]
    assert [plan and plan.pos_upper.tolist() for plan in plans] == [[5], [6], [7]]
    assert [plan and plan.sample_index.tolist() for plan in plans] == [[0], [1], [2]]


def test_page_entries_are_sent_once_and_one_at_a_time_while_decoding() -> None:
    loop = Loop(make_spec(page_tokens=4))
    loop.add(make_request(0, (2, 3, 4, 5, 6), max_tokens=9))
    loop.run()
    assert [plan.page_index.tolist() for plan in loop.plans] == [
        [0, 1],
        [],
        [],
        [],
        [2],
        [],
        [],
        [],
        [3],
    ]


def test_a_slot_is_described_to_the_device_when_it_is_taken_and_not_again() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    loop.add(make_request(0, max_tokens=3, stop_token_ids=(9,)))
    loop.add(make_request(1, max_tokens=3, ignore_eos=False))
    loop.run()
    deltas = [delta for plan in loop.plans for delta in plan.slots]
    assert [(delta.slot, delta.epoch) for delta in deltas] == [(0, 1), (0, 2)]
    assert [delta.stop_ids for delta in deltas] == [(9,), (1,)]


def test_past_tokens_are_sent_only_where_a_penalty_counts_them() -> None:
    loop = Loop(make_spec())
    outputs = (7, 8)
    loop.add(make_request(0, output_ids=outputs))
    loop.add(make_request(1, output_ids=outputs, presence_penalty=0.5))
    loop.add(make_request(2, output_ids=outputs, repetition_penalty=1.1))
    plan = loop.launch()
    assert plan is not None
    assert [tuple(delta.output_ids) for delta in plan.slots] == [(), outputs, outputs]
    assert [tuple(delta.prompt_ids) for delta in plan.slots] == [(), (), (2, 3, 4, 5, 6)]


def test_a_shared_prefix_is_computed_once() -> None:
    loop = Loop(make_spec())
    prompt = tuple(range(2, 15))
    loop.add(make_request(0, prompt, max_tokens=4))
    loop.run()
    loop.add(make_request(1, (*prompt[:9], 20, 21, 22, 23), max_tokens=4))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [8]
    loop.run()
    loop.check_finished()
    ending = loop.streams[1].ending
    assert ending is not None
    assert ending.usage.cached_tokens == 8


def test_a_prompt_that_is_known_to_the_last_page_still_computes_its_last_token() -> None:
    loop = Loop(make_spec())
    prompt = tuple(range(2, 10))  # two full pages
    for counter in range(2):
        loop.add(make_request(counter, prompt, max_tokens=4, seed=5))
        loop.run()
    assert loop.plans[-4].q_start.tolist() == [4]
    loop.check_finished()


def test_prompt_pages_are_shared_while_the_step_that_fills_them_is_in_flight() -> None:
    loop = Loop(make_spec())
    prompt = tuple(range(2, 15))
    loop.add(make_request(0, prompt))
    loop.launch()
    loop.add(make_request(1, prompt))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [13, 12]
    loop.run()
    loop.check_finished()


def test_generated_pages_are_shared_once_they_are_committed() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, (2, 3, 4), max_tokens=10))
    loop.run()
    spoken = tuple(loop.streams[0].tokens)
    loop.add(make_request(1, (2, 3, 4, *spoken, 9), max_tokens=2))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [12], "12 positions of the first turn were computed"


def test_without_a_prefix_cache_requests_share_nothing() -> None:
    loop = Loop(make_spec(), SchedulerSettings(prefix_cache=False))
    for counter in range(2):
        loop.add(make_request(counter, tuple(range(2, 15)), max_tokens=2))
        loop.run()
    assert loop.scheduler.stats().cached_tokens_total == 0


def test_tenants_with_different_salts_share_nothing() -> None:
    loop = Loop(make_spec())
    for counter, salt in enumerate(("a", "b", "a")):
        loop.add(make_request(counter, tuple(range(2, 15)), max_tokens=2, cache_salt=salt))
        loop.run()
    cached = [
        stream.ending and stream.ending.usage.cached_tokens for stream in loop.streams.values()
    ]
    assert cached == [0, 0, 12]


def test_lower_priority_numbers_go_first_and_arrival_decides_among_equals() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    for counter, priority in enumerate((0, 5, -1, 0)):
        loop.add(make_request(counter, max_tokens=2, priority=priority))
    order = []
    while loop.step():
        order += [c for c, s in loop.streams.items() if s.ending and c not in order]
    assert order == [2, 0, 3, 1]


def test_a_commit_out_of_order_is_refused() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0))
    loop.launch()
    loop.launch()
    plan, result = loop.in_flight[1]
    with pytest.raises(ValueError, match="not the oldest"):
        loop.scheduler.commit(plan, result, 0.0)
    with pytest.raises(ValueError, match="result of step"):
        loop.scheduler.commit(loop.in_flight[0][0], result, 0.0)


def test_events_carry_logprobs_only_where_they_were_asked_for() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, num_logprobs=2))
    loop.add(make_request(1))
    loop.run()
    loop.check_finished()  # each event's logprobs were compared with its tokens when heard


def test_sequences_that_merely_go_on_are_told_of_together() -> None:
    loop = Loop(make_spec(page_tokens=4))
    for counter in range(3):
        loop.add(make_request(counter, max_tokens=8, num_logprobs=-1 if counter < 2 else 0))
    told = []
    loop.launch()
    while loop.in_flight:
        loop.launch()
        loop.collect()
        news = loop.scheduler.drain_outputs()
        together = sum(len(item.token_S) for item in news if isinstance(item, StepTokens))
        told.append((together, sum(isinstance(item, SequenceOutput) for item in news)))
    assert told == [(0, 3), *[(2, 1)] * 6, (0, 3)]


def test_counts_of_load_and_work_are_kept() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    loop.add(make_request(0, (2, 3, 4, 5, 6), max_tokens=4))
    loop.add(make_request(1, (2, 3, 4, 5, 6), max_tokens=4))
    loop.launch()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_free) == (1, 1, 62)
    assert loop.scheduler.open_attempts("router") == [0, 1]
    assert loop.scheduler.open_attempts("another") == []
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (10, 4)
    assert stats.generated_tokens_total == 8
