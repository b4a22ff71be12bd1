"""Aborts at every stage: one terminal, everything freed before the next plan."""

from __future__ import annotations

from services.compute.scheduler.outputs import sequence_outputs
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

LONG = tuple(2 + i % 29 for i in range(40))


def check_aborted(loop: Loop, counter: int) -> None:
    """The attempt had its one terminal and holds nothing."""
    loop.hear()
    ending = loop.streams[counter].ending
    assert ending is not None
    assert ending.reason == "aborted"
    check_scheduler(loop.scheduler)
    assert counter not in loop.scheduler.open_attempts("router")


def free_pages(loop: Loop) -> int:
    """Pages free or evictable."""
    return loop.scheduler.stats().pages_free


def test_abort_while_waiting_takes_the_request_out_of_the_line() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    loop.add(make_request(0))
    loop.add(make_request(1))
    loop.step()
    assert loop.abort(1)
    check_aborted(loop, 1)
    assert loop.scheduler.stats().num_waiting == 0
    loop.run()
    loop.check_finished()


def test_abort_during_prefill_frees_every_page() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=8))
    loop.add(make_request(0, LONG))
    loop.launch()
    loop.launch()
    assert free_pages(loop) < 64
    assert loop.abort(0)
    assert free_pages(loop) == 64
    check_aborted(loop, 0)
    loop.run()


def test_abort_while_decoding_and_in_flight_frees_every_page_and_discards_the_token() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, max_tokens=30))
    for _ in range(4):
        loop.step()
    loop.launch()
    said = len(loop.streams[0].tokens)
    assert loop.abort(0)
    assert free_pages(loop) == 64
    loop.collect()
    check_aborted(loop, 0)
    assert len(loop.streams[0].tokens) == said
    loop.run()
    loop.check_finished()


def test_a_slot_freed_by_an_abort_is_taken_anew_while_the_old_row_is_in_flight() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    loop.add(make_request(0, max_tokens=30))
    loop.launch()
    loop.abort(0)
    loop.add(make_request(1, max_tokens=5))
    plan = loop.launch()
    assert plan is not None
    assert (plan.row_slot.tolist(), plan.row_epoch.tolist()) == ([0], [2])
    loop.run()
    loop.check_finished()


def test_abort_while_swapped_frees_the_host_pages() -> None:
    loop = Loop(make_spec(num_pages=10, num_host_pages=8))
    loop.add(make_request(0, tuple(range(2, 15)), 20))
    loop.add(make_request(1, tuple(range(12, 25)), 20))
    while not loop.scheduler.stats().num_swapped:
        loop.step()
    assert loop.abort(1)
    assert loop.scheduler._state.memory.host.num_free == 8
    check_aborted(loop, 1)
    loop.run()
    loop.check_finished()


def test_abort_of_a_parked_choice_leaves_the_others_alone() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=8))
    loop.add(make_request(0, LONG, 4, num_choices=3))
    loop.launch()
    assert loop.abort(1)
    check_aborted(loop, 1)
    loop.run()
    loop.check_finished()
    assert [s.ending and s.ending.reason for s in loop.streams.values()] == [
        "length",
        "aborted",
        "length",
    ]


def test_abort_of_a_leader_lets_the_next_choice_lead() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=8))
    loop.add(make_request(0, LONG, 4, num_choices=3))
    loop.launch()
    assert loop.abort(0)
    check_aborted(loop, 0)
    loop.run()
    loop.check_finished()
    assert loop.scheduler.stats().cached_tokens_total > 0


def test_a_second_abort_changes_nothing() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0))
    loop.step()
    assert loop.abort(0)
    assert not loop.abort(0)
    check_aborted(loop, 0)
    assert list(sequence_outputs(loop.scheduler.drain_outputs())) == []
    loop.run()


def test_an_abort_that_overtakes_its_request_refuses_it() -> None:
    loop = Loop(make_spec())
    assert not loop.abort(7)
    loop.now_s = 59.0
    loop.add(make_request(7))
    check_aborted(loop, 7)
    assert not loop.scheduler.has_work()


def test_a_tombstone_covers_one_choice_only() -> None:
    loop = Loop(make_spec())
    loop.abort(1)
    loop.add(make_request(0, num_choices=3))
    check_aborted(loop, 1)
    loop.run()
    loop.check_finished()
    assert len(loop.streams[2].tokens) == 8


def test_a_request_whose_attempt_is_open_already_is_passed_over() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0))
    loop.step()
    loop.scheduler.add_request(make_request(0), 0.0)
    loop.run()
    loop.check_finished()


def test_moving_ends_everything_that_is_left() -> None:
    loop = Loop(make_spec(num_pages=10, num_host_pages=8), SchedulerSettings(max_num_seqs=2))
    loop.add(make_request(0, tuple(range(2, 15)), 20, num_choices=3))
    loop.add(make_request(3, tuple(range(12, 25)), 20))
    for _ in range(6):
        loop.step()
    loop.scheduler.end_all(lambda request: True, "moved", loop.now_s)
    loop.hear()
    assert {s.ending and s.ending.reason for s in loop.streams.values()} == {"moved"}
    assert not loop.scheduler.has_work()
    check_scheduler(loop.scheduler)
    loop.run()
    loop.check_finished()


def test_ending_some_requests_leaves_the_others_alone() -> None:
    loop = Loop(make_spec())
    for counter in range(4):
        loop.add(make_request(counter, cache_salt="ab"[counter % 2]))
    loop.step()
    loop.scheduler.end_all(lambda request: request.cache_salt == "a", "aborted", loop.now_s)
    check_aborted(loop, 0)
    check_aborted(loop, 2)
    loop.run()
    loop.check_finished()
    assert len(loop.streams[3].tokens) == 8
