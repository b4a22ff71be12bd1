"""Pages on their way: leased until they are there, waited for, safe whatever happens meanwhile."""

from __future__ import annotations

import pytest

from services.compute.kv.memory import PagePool
from services.compute.kv.transfer import Direction
from services.compute.scheduler.planner import Planner
from services.compute.scheduler.sequence import Sequence, Status
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler
from tests.unit.compute.scheduler_loop import Loop, make_request

LONG = 1000  # turns: until the test ends the transfers
PROMPTS = [tuple(range(first, first + 13)) for first in (2, 12, 7, 17)]


def make_loop(turns: int, num_pages: int = 10, num_requests: int = 2) -> Loop:
    """Requests of nine pages at their end, in a memory that does not hold all of them."""
    spec = make_spec(num_pages=num_pages, num_host_pages=60)
    loop = Loop(spec, transfer_turns=turns)
    for counter in range(num_requests):
        loop.add(make_request(counter, PROMPTS[counter], 20))
    return loop


def step_until(loop: Loop, status: Status) -> Sequence:
    """Turn until some sequence is swapped or loading."""
    for _ in range(200):
        for sequence in loop.scheduler._state.attempts:
            if sequence.status is status:
                return sequence
        loop.step()
        check_scheduler(loop.scheduler)
    raise AssertionError(f"nobody is {status.value}")


@pytest.mark.parametrize("turns", [0, 1, 2, 7])
@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8, 8)])
def test_nothing_is_lost_however_long_transfers_last(turns: int, windows: tuple[int, ...]) -> None:
    num_pages = {(0,): 14, (8,): 7, (0, 8, 8): 28}[windows]
    spec = make_spec(windows=windows, num_pages=num_pages, num_host_pages=100)
    loop = Loop(spec, SchedulerSettings(max_prefill_tokens=8), transfer_turns=turns)
    for counter, prompt in enumerate(PROMPTS):
        loop.add(make_request(counter, prompt[:3], 20))
    loop.run()
    loop.check_finished()
    check_scheduler(loop.scheduler)
    assert loop.num_moved(Direction.TO_DEVICE) > 0
    computed = sum(plan.num_tokens for plan in loop.plans)
    assert computed == 4 * (3 + 19), "every position was computed exactly once"


def test_rows_wait_for_the_pages_that_are_coming_and_take_no_further_victim() -> None:
    loop = make_loop(LONG, num_pages=18, num_requests=4)
    step_until(loop, Status.SWAPPED)
    assert loop.scheduler.stats().preemptions_total == 1
    for _ in range(5):
        loop.step()
        check_scheduler(loop.scheduler)
    assert loop.scheduler.stats().preemptions_total == 1
    assert loop.launch() is None, "all rows wait"
    loop.end_transfers(all_of_them=True)
    plan = loop.launch()
    assert plan is not None
    assert plan.num_rows == 3
    loop.transfer_turns = 0
    loop.run()
    loop.check_finished()


@pytest.mark.parametrize(("num_old", "num_victims"), [(1, 1), (2, 2)])
def test_another_victim_goes_only_for_pages_that_are_not_coming(
    num_old: int, num_victims: int
) -> None:
    """Old ones with four pages each and two young ones with one: all need the next at once."""
    spec = make_spec(num_pages=4 * num_old + 2, num_host_pages=60)
    loop = Loop(spec, SchedulerSettings(in_flight_steps=0), transfer_turns=LONG)
    for counter in range(num_old):
        loop.add(make_request(counter, PROMPTS[counter], 12))
    for counter in range(2, 4):
        loop.add(make_request(counter, (counter,), 12))
    for _ in range(8):
        loop.step()
    check_scheduler(loop.scheduler)
    stats = loop.scheduler.stats()
    assert (stats.preemptions_total, stats.num_swapped) == (num_victims, num_victims)
    loop.transfer_turns = 0
    loop.end_transfers(all_of_them=True)
    loop.run()
    loop.check_finished()


def test_a_loading_sequence_runs_when_its_pages_are_there() -> None:
    loop = make_loop(2)
    sequence = step_until(loop, Status.LOADING)
    stats = loop.scheduler.stats()
    assert (stats.num_swapped, sequence.slot >= 0) == (1, True)
    host = loop.scheduler._state.memory.host
    assert host.num_free < host.num_pages
    loop.end_transfers(all_of_them=True)
    assert sequence.status is Status.RUNNING
    assert host.num_free == host.num_pages
    plan = loop.launch()
    assert plan is not None
    assert [delta.slot for delta in plan.slots] == [sequence.slot]
    loop.run()
    loop.check_finished()


@pytest.mark.parametrize("status", [Status.SWAPPED, Status.LOADING])
def test_pages_of_an_aborted_sequence_are_leased_until_its_transfers_end(status: Status) -> None:
    loop = make_loop(2 if status is Status.LOADING else LONG)
    step_until(loop, status)
    loop.abort(1)
    check_scheduler(loop.scheduler)
    memory = loop.scheduler._state.memory
    num_moving = len(loop.transfers[-1].pages.sources)
    assert memory.host.num_returned == num_moving
    assert memory.host.num_free == memory.host.num_pages - num_moving
    assert memory.device.num_returned + memory.device.num_read == num_moving
    loop.end_transfers(all_of_them=True)
    assert memory.host.num_free == memory.host.num_pages
    assert memory.device.num_returned == memory.device.num_read == 0
    loop.run()
    loop.check_finished()


def test_who_is_preempted_while_loading_keeps_its_pages_on_the_host() -> None:
    loop = make_loop(2)
    sequence = step_until(loop, Status.LOADING)
    num_out, host_pages = loop.num_moved(Direction.TO_HOST), sequence.host_pages
    loop.scheduler._planner._preempt(sequence)
    check_scheduler(loop.scheduler)
    assert sequence.status is Status.SWAPPED
    assert sequence.host_pages == host_pages
    loop.end_transfers(all_of_them=True)
    assert sequence.status is Status.SWAPPED, "another transfer brings it back"
    check_scheduler(loop.scheduler)
    loop.run()
    loop.check_finished()
    assert loop.num_moved(Direction.TO_HOST) == num_out
    assert loop.num_moved(Direction.TO_DEVICE) == 2 * len(loop.transfers[-1].pages.sources)


def test_pages_that_the_prefix_tree_shares_stay_valid_while_they_are_copied() -> None:
    loop = make_loop(LONG)
    step_until(loop, Status.SWAPPED)
    memory = loop.scheduler._state.memory
    loop.scheduler.flush_prefix_cache()
    check_scheduler(loop.scheduler)
    assert memory.device.num_returned == len(loop.transfers[0].pages.sources)
    loop.end_transfers(all_of_them=True)
    loop.transfer_turns = 0
    loop.run()
    loop.check_finished()


def test_evicting_pages_that_are_read_frees_nothing_yet() -> None:
    loop = make_loop(LONG)
    step_until(loop, Status.SWAPPED)
    memory = loop.scheduler._state.memory
    available, expected = memory.num_available, memory.num_expected
    assert available < expected
    assert memory.take(available + 1) is None
    pages = memory.take(available)
    assert pages is not None
    assert not set(pages) & set(loop.transfers[0].pages.sources.tolist())
    for page in pages:
        memory.device.give_back(page)
    loop.end_transfers(all_of_them=True)
    assert memory.num_available == memory.num_expected == expected
    loop.transfer_turns = 0
    loop.run()
    loop.check_finished()


def run_busily(loop: Loop) -> None:
    """Turns in which pages are taken by newcomers as soon as they are free."""
    for counter in range(4, 40):
        loop.add(make_request(counter, tuple(range(counter, 24 + counter)), 6, priority=-1))
        loop.step()
        loop.step()
    loop.run()
    loop.check_finished()


def test_a_pool_that_ignores_leases_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "lease", lambda self, pages, arriving: None)
    monkeypatch.setattr(PagePool, "end_lease", lambda self, pages: None)
    loop = make_loop(3, num_pages=18, num_requests=4)
    message = "still read|changed under a transfer|not there yet|page of another one"
    with pytest.raises(AssertionError, match=message):
        run_busily(loop)


def test_a_sequence_that_runs_before_its_pages_are_there_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swap_in(planner: Planner, sequence: Sequence, start: int) -> bool:
        if original(planner, sequence, start):
            planner._running.enter(sequence)
        return sequence.status is Status.RUNNING

    original = Planner._swap_in
    monkeypatch.setattr(Planner, "_swap_in", swap_in)
    loop = make_loop(3)
    with pytest.raises(AssertionError, match="a page that is not there yet"):
        loop.run()


def test_host_pages_that_are_given_away_while_they_are_written_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = make_loop(LONG, num_pages=18, num_requests=4)
    while not loop.transfers:
        loop.step()
    host = loop.scheduler._state.memory.host
    with monkeypatch.context() as planted:
        planted.setattr(host, "_leases", {})
        loop.abort(3)
    loop.scheduler._planner._preempt(loop.scheduler._state.running.youngest())
    with pytest.raises(AssertionError, match="writes to a page of another one"):
        loop.start_transfers()
