"""The compute actor with its real scheduler and step loop on the sim device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from common.messages.address import AttemptId
from common.messages.arrays import uint32s, uint64s
from common.messages.experts import ExpertLoad
from services.compute.expert_counters import HostCounters
from tests.flow.compute_ring import CARD, Ring


@pytest.fixture
async def make_ring() -> AsyncIterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(**settings: Any) -> Ring:
        made.append(Ring(**settings))
        return made[-1]

    yield make
    for ring in made:
        await ring.actor.stop()


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first", "static_batch"])
async def test_every_request_gets_its_tokens_and_one_terminal(
    make_ring: Callable[..., Ring], schedule: str
) -> None:
    ring = make_ring(schedule=schedule, static_batch_window_s=0.001)
    await ring.start()
    attempts = [ring.ask(counter, max_tokens=counter + 1) for counter in range(8)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    for counter, attempt in enumerate(attempts):
        assert len(ring.tokens(attempt)) == counter + 1
        assert ring.endings(attempt) == ["length"]
    assert ring.actor.idle
    assert ring.actor.drained


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first", "static_batch"])
async def test_the_warm_up_leaves_nothing_behind(
    make_ring: Callable[..., Ring], schedule: str
) -> None:
    ring = make_ring(schedule=schedule, static_batch_window_s=60.0)
    await ring.start()
    assert ring.actor.idle
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


async def test_the_header_comes_with_the_first_token_and_with_the_terminal(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring()
    await ring.start()
    attempt = ring.ask(1)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert [row.header for row in ring.rows] == [b"h", b"", b"", b"", b"h"]
    assert [row.opened is not None for row in ring.rows] == [True, False, False, False, False]
    assert ring.rows[0].opened is not None and ring.rows[0].opened.prompt_tokens == 20
    assert ring.rows[-1].ended is not None
    assert ring.rows[-1].ended.usage.completion_tokens == 5


async def test_one_message_a_step_carries_all_rows(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.002)
    await ring.start()
    attempts = [ring.ask(counter, max_tokens=20) for counter in range(8)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert len(ring.rows) == 160
    assert len(ring.messages) < 40


async def test_an_abort_frees_the_pages_and_says_so(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 3)
    ring.abort(attempt)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert ring.endings(attempt) == ["aborted"]
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


async def test_an_abort_that_comes_first_is_remembered(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring()
    await ring.start()
    ring.abort(AttemptId(ring.router.address.instance_id, 1))
    attempt = ring.ask(1)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert ring.endings(attempt) == ["aborted"]
    assert ring.tokens(attempt) == []


async def test_choices_share_one_prompt_and_end_each_on_its_own(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring()
    await ring.start()
    first = ring.ask(10, num_choices=3, prompt=range(40))
    attempts = [AttemptId(first.router, first.counter + choice) for choice in range(3)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert len({tuple(ring.tokens(attempt)) for attempt in attempts}) == 3
    cached = sorted(row.opened.cached_tokens for row in ring.rows if row.opened is not None)
    assert cached == [0, 32, 32]


async def test_too_few_pages_preempt_and_lose_no_token(make_ring: Callable[..., Ring]) -> None:
    plenty, tight = make_ring(num_pages=64), make_ring(num_pages=12)
    results = []
    for ring in (plenty, tight):
        await ring.start()
        attempts = [
            ring.ask(counter, max_tokens=60, prompt=range(counter, counter + 20))
            for counter in range(4)
        ]
        await ring.until(lambda r=ring, a=attempts: all(r.endings(attempt) for attempt in a))
        results.append([ring.tokens(attempt) for attempt in attempts])
    num_preemptions = tight.device.scheduler.stats().preemptions_total
    assert num_preemptions > 0
    assert results[0] == results[1]
    num_beats = len(tight.beats)
    tight.actor.tick(asyncio.get_running_loop().time() + 1.0)
    await tight.until(lambda: len(tight.beats) > num_beats)
    assert tight.beats[-1].load.steps is not None
    assert tight.beats[-1].load.steps.num_preemptions == num_preemptions


async def test_what_can_never_fit_is_refused_with_its_reason(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(num_pages=4)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: bool(ring.endings(attempt)))
    (row,) = ring.rows
    assert row.ended is not None and row.ended.failure is not None
    assert (row.ended.reason, row.ended.failure.status) == ("refused", 400)


async def test_a_draining_replica_takes_what_is_on_its_way_and_finishes_all(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    running = ring.ask(1, max_tokens=30)
    await ring.until(lambda: bool(ring.tokens(running)))
    ring.actor.drain()
    late = ring.ask(2)
    await ring.until(lambda: bool(ring.endings(late)) and bool(ring.endings(running)))
    assert ring.endings(running) == ring.endings(late) == ["length"]


async def test_at_the_end_of_the_grace_time_what_runs_is_moved(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    await ring.actor.stop()
    ring.exchange.deliver()
    assert ring.endings(attempt) == ["moved"]


async def test_a_router_that_falls_silent_loses_its_attempts(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    ring.exchange.kill("router")
    now_s = asyncio.get_running_loop().time()
    for step in range(30):
        ring.actor.tick(now_s + step * 0.1)
    await ring.until(lambda: ring.actor.idle)


async def test_heartbeats_list_open_attempts_and_load(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(7, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    num_beats = len(ring.beats)
    ring.actor.tick(asyncio.get_running_loop().time() + 1.0)
    await ring.until(lambda: len(ring.beats) > num_beats)
    beat = ring.beats[-1]
    assert list(beat.open_counters) == [7]
    assert beat.load.num_running == 1
    assert 0.0 < beat.load.kv_usage < 1.0
    assert beat.model == CARD


async def test_heartbeats_say_what_experts_were_given(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring()
    tokens_X = np.ones(2, dtype=np.int64)
    ring.faults.expert_counters = lambda: HostCounters({5: tokens_X})
    await ring.start()
    tokens_X += (3, 4)  # what the warm-up counted is gone
    ring.actor.tick(10.0)
    await ring.until(lambda: ring.beats[-1].experts is not None)
    assert ring.beats[-1].experts == ExpertLoad(uint32s((5,)), uint64s((3, 4)))
    assert ring.beats[0].experts is None  # written for a release that may not know of them
