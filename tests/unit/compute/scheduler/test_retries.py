"""A retry goes on where an earlier attempt, perhaps elsewhere, was cut off."""

from __future__ import annotations

import pytest

from services.compute.scheduler.recovery import RECOVERY_SHARE, prefill_budget
from services.compute.scheduler.state import SchedulerSettings
from services.compute.scheduler.waiting import WaitingQueue
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import EOS, generate
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = (2, 3, 4, 5, 6)


@pytest.mark.parametrize("produced", [1, 3, 7])
def test_a_retry_gives_exactly_the_tokens_that_were_missing(produced: int) -> None:
    loop = Loop(make_spec())
    whole = generate(PROMPT, make_request(0, max_tokens=8).sampling, 0)
    loop.add(make_request(0, PROMPT, 8, tuple(whole[:produced])))
    loop.run()
    loop.check_finished()
    stream = loop.streams[0]
    assert stream.new_tokens == whole[produced:]
    assert stream.ending is not None
    assert stream.ending.usage.completion_tokens == 8


def test_penalties_and_min_tokens_count_from_the_start_of_the_request() -> None:
    loop = Loop(make_spec())
    more = {"presence_penalty": 0.5, "min_tokens": 6, "stop_token_ids": (9, 10, 11, 12, 13)}
    whole = generate(PROMPT, make_request(0, max_tokens=20, **more).sampling, 0)
    loop.add(make_request(0, PROMPT, 20, tuple(whole[:3]), **more))
    loop.run()
    loop.check_finished()


def test_a_retry_with_all_its_tokens_ends_at_once_for_length() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 3, (7, 8, 9)))
    loop.hear()
    ending = loop.streams[0].ending
    assert ending is not None
    assert ending.reason == "length"
    assert not loop.scheduler.has_work()


@pytest.mark.parametrize(("last", "named"), [(EOS, None), (9, 9)])
def test_a_retry_that_had_stopped_already_ends_at_once(last: int, named: int | None) -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 30, (7, last), ignore_eos=False, stop_token_ids=(9,)))
    loop.hear()
    ending = loop.streams[0].ending
    assert ending is not None
    assert (ending.reason, ending.stop) == ("stop", named)
    assert ending.usage.completion_tokens == 2
    assert not loop.scheduler.has_work()


def test_a_retry_finds_the_pages_of_the_attempt_before_it() -> None:
    loop = Loop(make_spec())
    loop.add(make_request(0, PROMPT, 20))
    for _ in range(12):
        loop.step()
    said = tuple(loop.streams[0].tokens)
    loop.abort(0)
    loop.add(make_request(1, PROMPT, 20, said, seed=0))
    loop.run()
    loop.check_finished()
    ending = loop.streams[1].ending
    assert ending is not None
    assert ending.usage.cached_tokens == len(PROMPT), "of the prompt; outputs are not counted"


def test_what_goes_on_is_never_refused_and_runs_before_what_has_not_begun() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_waiting=2, max_num_seqs=1))
    whole = generate(PROMPT, make_request(0, max_tokens=8).sampling, 0)
    loop.add(make_request(10, PROMPT, 3))
    loop.step()
    for counter in (11, 12):
        loop.add(make_request(counter, PROMPT, 3))
    loop.add(make_request(13, PROMPT, 3))  # one too many
    loop.add(make_request(0, PROMPT, 8, tuple(whole[:3])))
    while loop.streams[0].ending is None:
        loop.step()
        loop.hear()
    assert loop.streams[11].ending is None
    loop.run()
    refused = loop.streams[13].ending
    assert refused is not None
    assert refused.failure is not None
    assert refused.failure.code == "overloaded"
    assert loop.streams[0].new_tokens == whole[3:]


RECOVERING = {"num_pages": 800, "max_num_seqs": 16, "max_step_tokens": 272}
NUM_LOST = 12


def lose(loop: Loop) -> list[int]:
    """Requests go on from a lost worker, 100 to 111 with 1 to 12 tokens; 1,200 are to compute."""
    counters = list(range(100, 100 + NUM_LOST))
    for counter in counters:
        prompt = tuple(2 + (counter * at + at) % 30 for at in range(100))
        request = make_request(counter, prompt, 30)
        said = generate(prompt, request.sampling, 0)[: counter - 99]
        loop.add(make_request(counter, prompt, 30, tuple(said)))
    return counters


def first_steps(loop: Loop, counters: list[int]) -> dict[int, int]:
    """In which step from now on each of these has its first new token."""
    found: dict[int, int] = {}
    for step in range(200):
        for counter in counters:
            if loop.streams[counter].new_tokens:
                found.setdefault(counter, step)
        if len(found) == len(counters):
            return found
        loop.step()
        loop.hear()
    raise AssertionError(f"only {found}")


def test_whether_anything_goes_on_is_known_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step asks, and the first of 1,000 waiting clients takes 0.2 ms to find."""
    loop = Loop(make_spec(), SchedulerSettings(max_num_seqs=1))
    for counter in range(3):
        loop.add(make_request(counter, PROMPT, 5))
    loop.step()
    state = loop.scheduler._state

    def budget() -> tuple[int, int]:
        with monkeypatch.context() as patch:
            patch.delattr(WaitingQueue, "first")
            left = prefill_budget(256, state.running, state.waiting)
        return left.tokens, left.recovery

    assert budget() == (256, 256)
    loop.add(make_request(9, PROMPT, 5, (7,)))
    assert budget() == (256, 256 // RECOVERY_SHARE)
    loop.abort(9)
    assert budget() == (256, 256)


def test_what_goes_on_takes_a_part_of_each_step_beside_what_is_served() -> None:
    """The first token of a new request comes with the next steps, and all that was lost goes on."""
    loop = Loop(make_spec(**RECOVERING), SchedulerSettings(max_prefill_tokens=256))
    loop.add(make_request(0, PROMPT, 100))
    loop.step()
    lost = lose(loop)
    loop.add(make_request(1, PROMPT, 5))
    steps = first_steps(loop, [1, *lost])
    assert steps.pop(1) <= 2
    order = sorted(lost, key=steps.__getitem__)
    assert order == sorted(lost, reverse=True), "not the most advanced first"
    num_steps = -(-100 * NUM_LOST // (256 // RECOVERY_SHARE))
    assert num_steps - 2 <= max(steps.values()) <= num_steps + 12
    loop.run()
    loop.check_finished()


def test_what_goes_on_takes_whole_steps_where_nothing_else_is_served() -> None:
    loop = Loop(make_spec(**RECOVERING), SchedulerSettings(max_prefill_tokens=256))
    steps = first_steps(loop, lose(loop))
    assert max(steps.values()) <= 100 * NUM_LOST // 256 + 3
    loop.run()
    loop.check_finished()
