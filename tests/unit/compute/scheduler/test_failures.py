"""What fails: a row alone, or a step with all that is in it."""

from __future__ import annotations

import pytest

from common.messages.address import AttemptId
from common.messages.failure import Failure
from services.compute.scheduler.sequence import Status
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import generate
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

BROKEN = Failure(500, "engine_step_failed", "The step failed.")
PROMPT = tuple(range(2, 15))
READER = (*PROMPT[:8], 21, 22, 23, 24, 25)


def fail_oldest(loop: Loop) -> None:
    """The oldest step in flight turns out to be broken."""
    plan, _ = loop.in_flight.popleft()
    loop.scheduler.fail_step(plan, BROKEN, loop.now_s)
    check_scheduler(loop.scheduler)


def test_nonfinite_logits_fail_their_own_sequence_alone() -> None:
    loop = Loop(make_spec())
    loop.device.nonfinite_seeds.add(1)
    for counter in range(3):
        loop.add(make_request(counter))
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "failed", "length"]
    ending = loop.streams[1].ending
    assert ending is not None
    assert ending.failure is not None
    assert (ending.failure.status, ending.failure.code) == (500, "nonfinite_logits")


def test_pages_behind_nonfinite_logits_are_not_found_again() -> None:
    loop = Loop(make_spec())
    loop.device.nonfinite_seeds.add(0)
    loop.add(make_request(0, PROMPT))
    loop.run()
    loop.add(make_request(1, PROMPT))
    loop.run()
    ending = loop.streams[1].ending
    assert ending is not None
    assert ending.usage.cached_tokens == 0


def test_a_step_that_cannot_be_launched_fails_what_was_in_it_and_nothing_else() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=2))
    loop.add(make_request(0))
    loop.add(make_request(1))
    loop.add(make_request(2))
    loop.launch()
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    loop.scheduler.fail_step(plan, BROKEN, 0.0)
    check_scheduler(loop.scheduler)
    assert loop.reasons() == ["failed", "failed", None]
    loop.run()
    loop.check_finished()


def test_pages_of_a_step_that_was_not_launched_are_not_shared() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    loop.scheduler.fail_step(plan, BROKEN, 0.0)
    loop.add(make_request(1, PROMPT))
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["failed", "length"]


@pytest.mark.parametrize("windows", [(0,), (3,), (9,), (0, 5), (5, 5, 0)])
def test_a_step_that_breaks_late_takes_those_along_that_read_its_pages(
    windows: tuple[int, ...],
) -> None:
    loop = Loop(make_spec(windows=windows))
    loop.add(make_request(0, PROMPT, 4))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    loop.in_flight.append((plan, loop.device.run(plan, damaged=True)))
    loop.add(make_request(1, PROMPT, 4))  # shares the pages that the broken step wrote
    loop.add(make_request(2, (20, 21, 22), 4))
    loop.launch()
    fail_oldest(loop)
    assert loop.reasons() == ["failed", "failed", None]
    loop.add(make_request(3, PROMPT, 4))  # and nobody finds them any more
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["failed", "failed", "length", "length"]


def damaged_in_one_kind(windows: tuple[int, ...]) -> Loop:
    """Request 1 leaves damaged pages for the window alone, and request 2 has read them."""
    loop = Loop(make_spec(windows=windows), SchedulerSettings(max_prefill_tokens=8))
    loop.add(make_request(0, PROMPT, 24))
    for _ in range(4):
        loop.step()
    while loop.collect():
        pass
    loop.scheduler.flush_prefix_cache()  # but for the pages in use: the window has left its first
    loop.add(make_request(1, (*PROMPT[:8], 20), 4))
    loop.add(make_request(2, READER, 4))
    loop.add(make_request(3, (30, 31), 4))  # waits, so that pages are shared when they are planned
    broken = loop.plan()
    assert broken is not None
    loop.in_flight.append((broken, loop.device.run(broken, damaged=True)))
    loop.abort(1)  # before its pages for all positions give way to those of request 0
    reading = loop.launch()
    assert reading is not None
    assert 8 in reading.q_start, "request 2 goes on behind eight shared positions"
    return loop


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("windows", [(0, 4), (4, 0)])
def test_pages_of_those_that_read_a_broken_step_are_not_found_in_any_kind_of_cache(
    windows: tuple[int, ...], leaves: bool
) -> None:
    """What request 2 filled for all positions is below pages of request 0, which are intact."""
    loop = damaged_in_one_kind(windows)
    if leaves:
        loop.abort(2)
    fail_oldest(loop)
    assert loop.reasons() == ["failed", "aborted", "aborted" if leaves else "failed", None]
    loop.add(make_request(4, READER, 4))
    loop.run()
    loop.check_finished()
    assert loop.reasons()[3:] == ["length", "length"]


@pytest.mark.parametrize("windows", [(0,), (4,), (0, 4)])
@pytest.mark.parametrize("num_more", [0, 1])
def test_a_step_that_breaks_fails_those_that_read_pages_which_are_not_found_any_more(
    windows: tuple[int, ...], num_more: int
) -> None:
    """The logits of a request that shares their first page were not finite."""
    settings = SchedulerSettings(in_flight_steps=2, max_prefill_tokens=13)
    loop = Loop(make_spec(windows=windows), settings)
    loop.device.nonfinite_seeds.add(0)
    loop.add(make_request(0, PROMPT[:5], 4))
    loop.launch()
    loop.add(make_request(1, PROMPT, 4))
    broken = loop.plan()
    assert broken is not None
    loop.in_flight.append((broken, loop.device.run(broken, damaged=True)))
    loop.add(make_request(2, (*PROMPT, *range(20, 32)), 4))
    reading = loop.launch()
    assert reading is not None
    assert reading.q_start[-1] == 12
    loop.collect()
    for _ in range(num_more):
        loop.launch()  # the window leaves the pages of request 1
    assert loop.reasons() == ["failed", None, None]
    fail_oldest(loop)
    assert loop.reasons() == ["failed", "failed", "failed"]
    loop.run()
    loop.check_finished()


def test_a_page_that_was_only_begun_in_the_broken_step_is_not_shared_either() -> None:
    loop = Loop(make_spec(), SchedulerSettings(in_flight_steps=2, max_prefill_tokens=3))
    loop.add(make_request(0, PROMPT, 4))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    loop.in_flight.append((plan, loop.device.run(plan, damaged=True)))
    loop.launch()  # completes the first page
    loop.add(make_request(1, PROMPT, 4, priority=-1))
    loop.launch()
    fail_oldest(loop)
    loop.run()
    loop.check_finished()
    assert loop.reasons()[0] == "failed"


def test_pages_evicted_before_their_step_breaks_are_left_alone() -> None:
    loop = Loop(make_spec(num_pages=8), SchedulerSettings(in_flight_steps=2))
    loop.add(make_request(0, PROMPT, 4))
    loop.launch()
    loop.scheduler.plan(0.0)  # publishes what the first step wrote
    loop.abort(0)
    loop.scheduler.flush_prefix_cache()
    loop.in_flight.clear()
    loop.add(make_request(1, PROMPT, 4))
    first = loop.plans[0]
    loop.scheduler.fail_step(first, BROKEN, 0.0)
    check_scheduler(loop.scheduler)


def test_a_sequence_whose_pages_were_not_copied_to_the_host_computes_everything_again() -> None:
    loop = Loop(make_spec(num_pages=10, num_host_pages=10))
    loop.add(make_request(0, PROMPT, 20))
    loop.add(make_request(1, tuple(range(12, 25)), 20))
    loop.num_failing = 1
    while loop.num_failing:
        assert loop.step()
        check_scheduler(loop.scheduler)
    stats = loop.scheduler.stats()
    assert (stats.num_swapped, stats.num_waiting, stats.preemptions_total) == (0, 1, 1)
    assert loop.scheduler._state.memory.host.num_free == 10
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "length"]


def test_a_sequence_whose_pages_did_not_come_back_computes_everything_again() -> None:
    loop = Loop(make_spec(num_pages=10, num_host_pages=10), transfer_turns=2)
    loop.add(make_request(0, PROMPT, 20))
    loop.add(make_request(1, tuple(range(12, 25)), 20))
    while not loop.scheduler.stats().num_swapped:
        loop.step()
    loop.num_failing = 1
    while loop.num_failing:
        assert loop.step() or loop.due
        check_scheduler(loop.scheduler)
    assert loop.scheduler.stats().num_swapped == 0
    assert loop.scheduler._state.memory.host.num_free == 10
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "length"]


def test_a_broken_step_leaves_alone_who_is_on_the_way_back() -> None:
    loop = Loop(make_spec(num_pages=12, num_host_pages=10), transfer_turns=3)
    loop.add(make_request(0, PROMPT, 20))
    loop.add(make_request(1, tuple(range(12, 25)), 28))
    while not any(s.status is Status.LOADING for s in loop.scheduler._state.running):
        assert loop.step() or loop.due
    loop.add(make_request(2, (2, 3), 4))
    broken = loop.plan()
    assert broken is not None
    loop.scheduler.fail_step(broken, BROKEN, 0.0)
    check_scheduler(loop.scheduler)
    assert loop.scheduler.stats().num_swapped == 1
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "length", "failed"]


def swapped_out_with_a_damaged_page(in_flight_steps: int) -> Loop:
    """Request 2 is swapped out while a broken step is in flight, in which it has no row."""
    settings = SchedulerSettings(max_prefill_tokens=2, in_flight_steps=in_flight_steps)
    loop = Loop(make_spec(num_pages=9, num_host_pages=10), settings)
    victim = make_request(2, (12, 13, 14, 15), 10)
    outputs = generate((12, 13, 14, 15), victim.sampling, 0)
    loop.add(make_request(0, (2, 3), 14))
    for _ in range(4):
        loop.launch()
        loop.collect()
    loop.add(make_request(1, (7, 8), 10))
    loop.add(victim)
    for _ in range(6):
        loop.launch()
        loop.collect()
    loop.add(make_request(3, (12, 13, 14, 15, *outputs[:4], 30), 4, priority=-1))
    loop.add(make_request(4, (20, 21, 22), 4))  # waits, so that pages are shared when planned
    loop.launch()
    broken = loop.plan()  # pages are short: request 3 alone has a row, and fills its second page
    assert broken is not None
    assert (broken.q_start.tolist(), broken.q_len.tolist()) == ([6], [2])
    loop.in_flight.append((broken, loop.device.run(broken, damaged=True)))
    loop.collect()  # fills the second page of request 2, which gives way to that of request 3
    loop.launch()
    assert status_of(loop, 2) is Status.SWAPPED
    return loop


def status_of(loop: Loop, counter: int) -> Status:
    """Where an open attempt is."""
    sequence = loop.scheduler._state.attempts.get(AttemptId("router", counter))
    assert sequence is not None
    return sequence.status


def test_a_sequence_swapped_out_during_a_broken_step_computes_everything_again() -> None:
    loop = swapped_out_with_a_damaged_page(in_flight_steps=1)
    fail_oldest(loop)
    assert status_of(loop, 2) is Status.WAITING
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "length", "length", "failed", "length"]


@pytest.mark.parametrize(
    ("status", "reason"), [(Status.LOADING, "length"), (Status.RUNNING, "failed")]
)
def test_a_sequence_swapped_out_during_a_broken_step_fails_if_it_runs_again(
    status: Status, reason: str
) -> None:
    """While its pages are only on the way back, it computes everything again."""
    loop = swapped_out_with_a_damaged_page(in_flight_steps=2)
    loop.abort(0)
    loop.abort(3)
    loop.scheduler.flush_prefix_cache()  # so that the damaged page is on the host alone
    loop.launch()
    if status is Status.RUNNING:
        loop.end_transfers(all_of_them=True)
    assert status_of(loop, 2) is status
    fail_oldest(loop)
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["aborted", "length", reason, "aborted", "length"]


def test_page_tables_are_sent_again_after_a_broken_step() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=4))
    loop.add(make_request(0, (2, 3, 4), 20))
    loop.step()
    plan = loop.launch()
    assert plan is not None
    loop.collect()
    loop.add(make_request(1, (20, 21, 22, 23, 24), 4))
    broken = loop.scheduler.plan(0.0)
    assert broken is not None
    loop.collect()
    loop.scheduler.fail_step(broken, BROKEN, 0.0)
    loop.run()
    loop.check_finished()


@pytest.mark.parametrize("ran", [False, True])
def test_who_had_a_slot_and_no_row_in_a_broken_step_keeps_its_own_settings(ran: bool) -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=2, max_scored_tokens=4))
    for counter in range(2):
        loop.add(make_request(counter, max_tokens=3, presence_penalty=0.5))
    loop.run()  # both slots have had other owners
    for counter in (2, 3):
        prompt = (counter, *PROMPT)
        loop.add(make_request(counter, prompt, presence_penalty=0.5, num_prompt_logprobs=0))
    broken = loop.scheduler.plan(0.0)
    assert broken is not None
    assert (len(broken.slots), broken.num_rows) == (2, 1)
    if ran:
        loop.device.run(broken, damaged=True)
    loop.scheduler.fail_step(broken, BROKEN, 0.0)
    check_scheduler(loop.scheduler)
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["length", "length", "failed", "length"]


def test_who_runs_on_the_device_already_when_a_step_breaks_is_not_described_again() -> None:
    """The device counts what it has said meanwhile, which the host does not know yet."""
    loop = Loop(make_spec(), SchedulerSettings(max_scored_tokens=4))
    loop.add(make_request(0, (2, 3, 4, 5, 6), num_prompt_logprobs=0))
    loop.add(make_request(1, (7, 8, 9, 10), presence_penalty=0.5, num_prompt_logprobs=0))
    broken = loop.scheduler.plan(0.0)
    assert broken is not None
    assert (len(broken.slots), broken.num_rows) == (2, 1)
    loop.in_flight.append((broken, loop.device.run(broken, damaged=True)))
    ahead = loop.launch()
    assert ahead is not None
    assert ahead.num_rows == 2
    fail_oldest(loop)
    after = loop.launch()
    assert after is not None
    assert after.slots == ()
    loop.run()
    loop.check_finished()
    assert loop.reasons() == ["failed", "length"]
