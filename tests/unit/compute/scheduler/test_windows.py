"""Models with windows: pages in use follow the window, and prefix hits need the last one only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.messages.sampling import GrammarSpec
from services.compute.kv.transfer import Direction
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.memory_check import check_scheduler, tables_of
from tests.unit.compute.scheduler_loop import Loop, make_request

CHUNK = 2048
LONG = 31_995  # not a whole number of pages


def text(length: int, seed: int = 1) -> tuple[int, ...]:
    """Tokens that do not repeat themselves soon."""
    return tuple((position * (position + seed) // 7 + seed) % 30 + 2 for position in range(length))


def large_spec(windows: Sequence[int], num_pages: int) -> RunnerSpec:
    """A runner with pages of 16 tokens and room for texts of 32k."""
    return make_spec(
        windows=windows,
        page_tokens=16,
        num_pages=num_pages,
        max_model_len=32_768,
        max_step_tokens=CHUNK + 8,
    )


def pages_in_use(loop: Loop) -> int:
    """Pages that nothing else can have now."""
    stats = loop.scheduler.stats()
    return stats.pages_total - stats.pages_free


def most_in_use(loop: Loop) -> tuple[int, int]:
    """The most pages in use while a prompt is computed, and in the decode steps after it."""
    prefill = decode = 0
    while (plan := loop.launch()) is not None:
        if plan.q_len.max() > 1:
            prefill = max(prefill, pages_in_use(loop))
        else:
            decode = max(decode, pages_in_use(loop))
        loop.collect()
        loop.hear()
    loop.run()
    loop.check_finished()
    return prefill, decode


@pytest.mark.parametrize(
    ("windows", "in_prefill", "in_decode"),
    [
        ((0,), 2000, 2003),
        # Mistral 7B v0.1: all layers see 4,096 positions. Beside them lies the chunk in flight.
        ((4096,), 4096 // 16 + CHUNK // 16, 4096 // 16 + 1),
        # Gemma 3: five of six layers see 1,024 positions, so there are five such groups of six.
        (
            (0, *(1024,) * 5),
            2000 + 5 * (1024 // 16 + CHUNK // 16),
            2003 + 5 * (1024 // 16 + 1),
        ),
    ],
    ids=["full", "mistral", "gemma-3"],
)
def test_pages_in_use_at_32k_tokens(
    windows: tuple[int, ...], in_prefill: int, in_decode: int
) -> None:
    loop = Loop(large_spec(windows, 13_000), SchedulerSettings(max_prefill_tokens=CHUNK))
    loop.add(make_request(0, text(LONG), 40))
    assert most_in_use(loop) == (in_prefill, in_decode)


def test_a_model_with_windows_only_takes_texts_that_are_longer_than_its_memory() -> None:
    loop = Loop(large_spec((4096,), 400), SchedulerSettings(max_prefill_tokens=CHUNK))
    loop.add(make_request(0, text(LONG), 20))
    loop.add(make_request(1, text(LONG, seed=4), 20))
    loop.run()
    loop.check_finished()
    assert [len(stream.tokens) for stream in loop.streams.values()] == [20, 20]


@pytest.mark.parametrize(
    ("windows", "num_pages", "most"),
    [((0,), 20, 80), ((0, 0), 20, 40), ((0, 8), 20, 60), ((0, 8, 8), 30, 80), ((8,), 5, 256)],
)
def test_a_request_is_refused_if_it_could_never_have_its_pages_in_every_kind(
    windows: tuple[int, ...], num_pages: int, most: int
) -> None:
    spec = make_spec(windows=windows, num_pages=num_pages, max_model_len=256)
    settings = SchedulerSettings(max_prefill_tokens=8)
    loop = Loop(spec, settings)
    loop.add(make_request(0, text(10), most - 10))
    loop.run()
    loop.check_finished()
    assert loop.streams[0].ending is not None
    assert loop.streams[0].ending.reason == "length"
    loop.add(make_request(1, text(most), 2))
    loop.run()
    failure = loop.streams[1].ending and loop.streams[1].ending.failure
    assert failure is not None
    assert failure.code == "context_length_exceeded"


def cached(loop: Loop, counter: int, prompt: tuple[int, ...]) -> int:
    """How much of a prompt need not be computed."""
    loop.add(make_request(counter, prompt, 2))
    loop.run()
    loop.check_finished()
    check_scheduler(loop.scheduler)
    ending = loop.streams[counter].ending
    assert ending is not None
    return ending.usage.cached_tokens


def evict_oldest(loop: Loop, count: int) -> None:
    """Let go of the pages that were used least recently."""
    memory = loop.scheduler._state.memory
    taken = memory.take(memory.device.num_free + count)
    assert taken is not None
    for page in taken:
        memory.device.give_back(page)


@pytest.mark.parametrize("windows", [(8,), (7, 7)])
def test_a_hit_needs_the_last_window_only_where_no_kind_sees_more(windows: tuple[int, ...]) -> None:
    loop = Loop(make_spec(windows=windows), SchedulerSettings(max_prefill_tokens=8))
    assert cached(loop, 0, text(40)) == 0
    evict_oldest(loop, 6 * len(windows))  # the first 24 tokens' pages
    assert cached(loop, 1, text(40)) == 36
    assert cached(loop, 2, text(20)) == 0, "but not what was evicted"


def test_a_hit_needs_every_page_of_a_kind_that_sees_all_positions() -> None:
    loop = Loop(make_spec(windows=(0, 8)), SchedulerSettings(max_prefill_tokens=8))
    assert cached(loop, 0, text(40)) == 0
    assert cached(loop, 1, text(40)) == 36
    evict_oldest(loop, 7)  # those that left the window first
    assert cached(loop, 2, text(40)) == 36
    evict_oldest(loop, 10)
    assert cached(loop, 3, text(40)) < 36


def test_a_shorter_hit_needs_the_window_before_it() -> None:
    loop = Loop(make_spec(windows=(0, 8)), SchedulerSettings(max_prefill_tokens=40))
    assert cached(loop, 0, text(40)) == 0
    # Published in one chunk: the pages of all windows are there.
    assert cached(loop, 1, (*text(21), 31, 30, 29)) == 20
    # What the second prompt found was used since; the other pages that left the window go.
    evict_oldest(loop, 6)
    assert cached(loop, 2, (*text(9), 31, 30, 29)) == 0
    assert cached(loop, 3, (*text(21), 30, 30, 29)) == 20


def test_salts_stay_apart_in_every_kind() -> None:
    loop = Loop(make_spec(windows=(0, 8)))
    loop.add(make_request(0, text(30), 2, cache_salt="one"))
    loop.run()
    assert cached(loop, 1, text(30)) == 0
    loop.add(make_request(2, text(30), 2, cache_salt="one"))
    loop.run()
    loop.check_finished()
    assert loop.streams[2].ending is not None
    assert loop.streams[2].ending.usage.cached_tokens == 28


@pytest.mark.parametrize("windows", [(8,), (0, 9, 9)])
@pytest.mark.parametrize("num_host_pages", [0, 100])
def test_a_preempted_sequence_comes_back_with_what_it_still_sees(
    windows: tuple[int, ...], num_host_pages: int
) -> None:
    num_pages = 7 if windows == (8,) else 25
    spec = make_spec(windows=windows, num_pages=num_pages, num_host_pages=num_host_pages)
    loop = Loop(spec, SchedulerSettings(max_prefill_tokens=8, prefix_cache=False))
    for counter in range(3):
        loop.add(make_request(counter, text(3, counter), 16))
    while loop.step():
        check_scheduler(loop.scheduler)
    loop.run()
    loop.check_finished()
    stats = loop.scheduler.stats()
    assert stats.preemptions_total
    swapped = [len(t.pages.sources) for t in loop.transfers if t.direction is Direction.TO_HOST]
    assert bool(swapped) is bool(num_host_pages)
    if windows == (8,):
        assert max(swapped, default=0) <= 3 * stats.preemptions_total


@pytest.mark.parametrize("windows", [(8,), (0, 8, 8)])
def test_choices_of_a_request_share_what_the_first_leaves(windows: tuple[int, ...]) -> None:
    loop = Loop(make_spec(windows=windows, num_pages=200))
    loop.add(make_request(0, text(30), 12, num_choices=4))
    loop.run()
    loop.check_finished()
    assert sum(plan.num_tokens for plan in loop.plans) == 30 + 3 * 2 + 4 * 11


@pytest.mark.parametrize("position", range(8, 18))
def test_a_skipped_sample_is_computed_again_with_its_whole_window(position: int) -> None:
    loop = Loop(make_spec(windows=(8, 5)), SchedulerSettings(in_flight_steps=0))
    grammar = GrammarSpec(allowed_token_ids=(3,))
    loop.add(make_request(0, text(position), 12, grammar_spec=grammar))
    for number in range(40):
        plan = loop.plan()
        if plan is None:
            break
        skipped = frozenset(plan.structured if number % 2 else ())
        loop.scheduler.reschedule(plan, skipped)
        loop.in_flight.append((plan, loop.device.run(plan, skipped=skipped)))
        loop.collect()
        loop.hear()
    loop.check_finished()


def test_a_page_that_is_released_too_early_fails_the_row_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(make_spec(windows=(16,)), SchedulerSettings(max_prefill_tokens=8))
    loop.add(make_request(0, text(40), 12))
    assert loop.step()
    (kind,) = loop.scheduler._state.memory.kinds
    monkeypatch.setattr(kind, "first_entry", lambda position: max(position - 7, 0) // 4)
    with pytest.raises(AssertionError, match="released too early"):
        loop.run()


def test_a_page_that_another_sequence_got_fails_the_row_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SchedulerSettings(max_prefill_tokens=8, prefix_cache=False)
    loop = Loop(make_spec(windows=(16,), num_pages=8), settings)
    monkeypatch.setattr("tests.unit.compute.scheduler_loop.check_plan", lambda *_: None)
    loop.add(make_request(0, text(40), 12))
    loop.add(make_request(1, text(40, seed=4), 12))
    loop.step()
    (kind,) = loop.scheduler._state.memory.kinds
    monkeypatch.setattr(kind, "_reach", 8)
    monkeypatch.setattr(kind, "first_entry", lambda position: max(position - 7, 0) // 4)
    with pytest.raises(
        AssertionError, match="two owners|is not of group|another sequence's tokens"
    ):
        loop.run()


def test_the_device_hears_of_every_group_of_an_entry() -> None:
    loop = Loop(make_spec(windows=(0, 8, 8, 0)))
    loop.add(make_request(0, text(9), 2))
    plan = loop.launch()
    assert plan is not None
    assert sorted(zip(plan.page_group.tolist(), plan.page_index.tolist(), strict=True)) == [
        (group, index) for group in range(4) for index in range(3)
    ]
    assert len(set(plan.page_id.tolist())) == 12
    (sequence,) = loop.scheduler._state.running
    assert [len(table.pages) for table in tables_of(sequence.table)] == [3, 3]
    loop.run()
    loop.check_finished()


@pytest.mark.parametrize(("windows", "num_pages"), [((0,), 12), ((8, 0, 0), 31)])
def test_what_another_computed_meanwhile_is_not_swapped_in(
    windows: tuple[int, ...], num_pages: int
) -> None:
    spec = make_spec(windows=windows, num_pages=num_pages, num_host_pages=60)
    loop = Loop(spec, SchedulerSettings(max_prefill_tokens=8, in_flight_steps=0))
    loop.add(make_request(0, (31, 30, 29, 28, 27), 8))
    loop.add(make_request(1, text(40), 4))
    while not loop.scheduler.stats().num_swapped:
        assert loop.step()
    loop.add(make_request(2, text(40), 4, priority=-1))
    loop.run()
    loop.check_finished()
    assert 0 < loop.num_moved(Direction.TO_HOST) < num_pages
    assert loop.num_moved(Direction.TO_DEVICE) == 0
