"""No client waits for another's requests: turns by tokens, slots, pages, prompts and the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.failure import Ending
from services.compute.scheduler.policies import DecodeFirst, PrefillFirst, SchedulingPolicy
from services.compute.scheduler.sequence import OUTPUT_WEIGHT
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import generate
from tests.unit.compute.scheduler_loop import Loop, make_request

PROMPT = (2, 3, 4, 5, 6)


def prompt_of(first: int, length: int = 6) -> tuple[int, ...]:
    """A prompt of the fake device's few tokens; another one for another first number."""
    return tuple(2 + (first * 7 + at * (first + 1)) % 30 for at in range(length))


def steps_until(loop: Loop, counter: int, most: int = 200) -> int:
    """Steps until an attempt has its first token."""
    for step in range(most):
        if loop.streams[counter].tokens:
            return step
        loop.step()
    raise AssertionError(f"{counter} has no token after {most} steps")


def ending_of(loop: Loop, counter: int) -> Ending:
    ending = loop.streams[counter].ending
    assert ending is not None
    return ending


def flooded(num_requests: int, **settings: int) -> Loop:
    """A scheduler of four slots in which client `a` has asked for much."""
    loop = Loop(
        make_spec(num_pages=400, max_num_seqs=4), SchedulerSettings(max_num_seqs=4, **settings)
    )
    for counter in range(num_requests):
        loop.add(make_request(counter, prompt_of(counter), 60, client="a"))
        loop.step()
    return loop


def test_a_flood_of_one_client_delays_another_by_a_few_steps() -> None:
    loop = flooded(100)
    loop.add(make_request(1000, PROMPT, 4, client="b"))
    assert steps_until(loop, 1000) <= 4
    loop.run()
    loop.check_finished()
    assert all(
        len(stream.tokens) == 60 for counter, stream in loop.streams.items() if counter < 100
    )


def test_without_a_name_a_request_waits_in_the_line_of_those_without_one() -> None:
    loop = flooded(0)
    for counter in range(12):
        loop.add(make_request(counter, prompt_of(counter), 20))
    assert steps_until(loop, 11) > 40


def test_a_client_keeps_its_part_of_the_slots_and_no_sequence_goes_back_and_forth() -> None:
    loop = flooded(20)
    for counter in range(1000, 1020):
        loop.add(make_request(counter, prompt_of(counter), 60, client="b"))
    for _ in range(12):
        loop.step()
    shares = loop.scheduler._state.shares
    assert [shares.of(client).num_running for client in "ab"] == [2, 2]
    before = loop.scheduler.stats().preemptions_total
    assert before == 2
    for _ in range(30):
        loop.step()
    assert loop.scheduler.stats().preemptions_total == before
    loop.run()
    loop.check_finished()


def test_a_more_urgent_sequence_is_not_preempted_for_another_client() -> None:
    loop = Loop(make_spec(max_num_seqs=4), SchedulerSettings(max_num_seqs=4))
    for counter in range(4):
        loop.add(make_request(counter, prompt_of(counter), 30, client="a", priority=-1))
    for _ in range(4):
        loop.step()
    loop.add(make_request(1000, PROMPT, 4, client="b"))
    assert steps_until(loop, 1000) > 20
    assert loop.scheduler.stats().preemptions_total == 0


def test_a_long_prompt_under_way_does_not_hold_up_another_client() -> None:
    loop = Loop(
        make_spec(num_pages=400, max_num_seqs=4),
        SchedulerSettings(max_num_seqs=4, max_prefill_tokens=8),
    )
    loop.add(make_request(0, prompt_of(1, 200), 4, client="a"))
    for _ in range(3):
        loop.step()
    loop.add(make_request(1, PROMPT, 4, client="b"))
    assert steps_until(loop, 1) <= 3
    assert not loop.streams[0].tokens
    loop.run()
    loop.check_finished()


def test_a_full_queue_takes_places_from_the_client_that_has_most() -> None:
    loop = flooded(14, max_waiting=10)
    loop.add(make_request(1000, PROMPT, 4, num_choices=2, client="b"))
    loop.hear()
    refused = [counter for counter in range(14) if loop.streams[counter].ending]
    assert refused == [12, 13]  # the last to come
    failure = ending_of(loop, 13).failure
    assert failure is not None
    assert (failure.status, failure.code, failure.retryable) == (503, "overloaded", True)
    loop.add(make_request(2000, prompt_of(99), 4, client="a"))
    loop.hear()
    assert ending_of(loop, 2000).reason == "refused"
    loop.run()
    loop.check_finished()


def test_the_counter_is_of_tokens_computed_and_of_those_generated() -> None:
    loop = flooded(0)
    share = loop.scheduler._state.shares.of("a")
    loop.add(make_request(0, prompt_of(1, 32), 17, client="a"))
    loop.run()
    # the last token is never computed
    assert share.tokens == 32 + 16 * OUTPUT_WEIGHT
    loop.add(make_request(1, prompt_of(1, 32), 1, client="a"))
    loop.run()
    cached = ending_of(loop, 1).usage.cached_tokens
    assert cached > 0
    assert share.tokens == 32 + 16 * OUTPUT_WEIGHT + 32 - cached


def test_a_client_that_was_away_has_not_saved_up() -> None:
    loop = flooded(0)
    shares = loop.scheduler._state.shares
    loop.add(make_request(0, PROMPT, 20, client="a"))
    loop.run()
    at_its_start = shares.of("a").tokens
    loop.add(make_request(1, PROMPT, 60, client="a"))
    for _ in range(10):
        loop.step()
    loop.add(make_request(2, PROMPT, 4, client="b"))
    assert shares.of("b").tokens >= at_its_start > 0


def test_who_was_alone_does_not_pay_for_it_later() -> None:
    loop = flooded(0)
    for counter in range(20):
        loop.add(make_request(counter, prompt_of(counter), 60, client="a"))
        loop.run()
    for counter in range(1000, 1100):
        loop.add(make_request(counter, prompt_of(counter), 60, client="b"))
        loop.step()
    loop.add(make_request(2000, PROMPT, 4, client="a"))
    assert steps_until(loop, 2000) <= 8


def test_one_request_kept_open_saves_no_turns() -> None:
    loop = flooded(40)
    loop.add(make_request(1000, PROMPT, 200, client="b"))
    for _ in range(100):
        loop.step()
    shares = loop.scheduler._state.shares
    behind = shares.of("a").tokens - shares.of("b").tokens
    assert behind > 200  # one of four slots
    loop.add(make_request(1001, PROMPT, 4, client="b"))
    assert shares.of("b").tokens == shares.of("a").tokens


def test_what_another_worker_had_begun_goes_first_and_is_charged_once() -> None:
    loop = flooded(30)
    tokens = generate(PROMPT, make_request(0, PROMPT, 60, client="b").sampling, 0, 20)
    before = loop.scheduler._state.shares.of("b").tokens
    for counter in range(1000, 1010):
        request = make_request(counter, PROMPT, 23, tuple(tokens), client="b", seed=0)
        loop.add(request)
    for counter in range(2000, 2040):
        loop.add(make_request(counter, prompt_of(counter), 60, client="c"))
    share = loop.scheduler._state.shares.of("b")
    begun = share.tokens
    assert begun >= before
    for counter in range(1000, 1010):
        steps_until_new(loop, counter)
    waiting = loop.scheduler._state.waiting
    assert sum(s.share.name == "c" for s in waiting) >= 38
    loop.run()
    loop.check_finished()
    assert share.tokens - begun <= 10 * 4 * OUTPUT_WEIGHT


def steps_until_new(loop: Loop, counter: int, most: int = 200) -> None:
    for _ in range(most):
        if loop.streams[counter].new_tokens:
            return
        loop.step()
    raise AssertionError(f"{counter} does not go on")


def go_on(loop: Loop, counter: int, num_prompt: int, client: str) -> None:
    """Add what has five of 30 tokens from another worker."""
    prompt = prompt_of(counter, num_prompt)
    begun = generate(prompt, make_request(counter, prompt, 30).sampling, 0, 5)
    loop.add(make_request(counter, prompt, 30, tuple(begun), client=client))


@pytest.mark.parametrize("policy", [DecodeFirst(), PrefillFirst()])
def test_who_comes_first_in_the_queue_again_is_not_preempted(policy: SchedulingPolicy) -> None:
    """Else its prompt began again with every step: for ever where a step is less than a page."""
    settings = SchedulerSettings(max_num_seqs=3, max_prefill_tokens=3, in_flight_steps=0)
    loop = Loop(make_spec(max_num_seqs=3), settings, policy)
    for counter in range(3):
        go_on(loop, counter, 20, client="a")
    loop.step()
    loop.add(make_request(1000, PROMPT, 4, client="b"))
    loop.run(max_steps=200)
    loop.check_finished()
    assert loop.scheduler.stats().preemptions_total == 0


def test_nobody_is_preempted_for_what_goes_on_as_long_as_others_of_it_take_its_tokens() -> None:
    loop = Loop(make_spec(num_pages=400, max_num_seqs=4), SchedulerSettings(max_num_seqs=4))
    for counter in range(3):
        loop.add(make_request(counter, prompt_of(counter), 60, client="a"))
    for _ in range(4):
        loop.step()
    for counter in range(1000, 1003):
        go_on(loop, counter, 200, client="b")
    for counter in range(1000, 1003):
        steps_until_new(loop, counter)
    assert loop.scheduler.stats().preemptions_total == 1
    loop.run()
    loop.check_finished()


def test_nothing_that_a_client_reads_gives_up_its_place() -> None:
    loop = flooded(4, max_waiting=8)
    loop.add(make_request(100, PROMPT, 30, num_choices=7, client="a"))
    while sum(bool(loop.streams[100 + choice].tokens) for choice in range(7)) < 2:
        loop.step()
    for counter in range(200, 206):
        first_try = make_request(counter, PROMPT, 30, client="a")
        begun = tuple(generate(PROMPT, first_try.sampling, 0, 2))
        loop.add(make_request(counter, PROMPT, 30, begun, client="a"))
    for counter in range(1000, 1004):
        loop.add(make_request(counter, prompt_of(counter), 4, client="b"))
    loop.run()
    loop.check_finished()
    for counter in (*range(100, 107), *range(200, 206)):
        assert ending_of(loop, counter).reason != "refused"


def test_no_place_is_taken_for_a_request_that_is_refused_all_the_same() -> None:
    loop = flooded(14, max_waiting=10)
    loop.add(make_request(1000, PROMPT, 4, num_choices=9, client="b"))
    loop.hear()
    assert ending_of(loop, 1000).reason == "refused"
    assert not any(loop.streams[counter].ending for counter in range(14))


def test_nobody_is_preempted_for_pages_that_would_not_be_enough() -> None:
    loop = Loop(make_spec(num_pages=30, max_num_seqs=8), SchedulerSettings(max_num_seqs=8))
    page = loop.spec.kv_groups[0].page_tokens
    for counter in range(6):
        loop.add(make_request(counter, prompt_of(counter), 20, client="a"))
        loop.step()
    loop.add(make_request(1000, prompt_of(3, 28 * page), 4, client="b"))
    for _ in range(10):
        loop.step()
    assert loop.scheduler.stats().preemptions_total == 0
    loop.run()
    loop.check_finished()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.integers(1, 30)),
        min_size=2,
        max_size=40,
    )
)
def test_of_two_clients_that_always_have_work_none_is_far_ahead(
    wishes: list[tuple[str, int, int]],
) -> None:
    """Apart by what one may have running at most, whatever the sizes of the requests."""
    loop = flooded(0)
    for counter, (client, prompt, outputs) in enumerate(wishes):
        loop.add(make_request(counter, prompt_of(counter, prompt), outputs, client=client))
    shares = loop.scheduler._state.shares
    most = 0
    while all(any(s.share.name == c for s in loop.scheduler._state.waiting) for c in "ab"):
        loop.step()
        most = max(most, abs(shares.of("a").tokens - shares.of("b").tokens))
    assert most <= 4 * (40 + OUTPUT_WEIGHT * 30)
    loop.run()
    loop.check_finished()
