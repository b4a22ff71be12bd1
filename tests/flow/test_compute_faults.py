"""What a compute service does when its device or its links fail."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import structlog

from common.errors import FatalError
from common.messages.address import AttemptId
from common.service import Watch, run_service
from services.compute.runner.protocol import Runner, RunnerSpec, SlotErrors
from tests.flow.compute_ring import Ring, running_ring
from tests.memory_link import MemoryTransport
from tests.patience import PATIENCE_S

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("where", ["forward_errors", "result_errors"])
async def test_a_broken_step_fails_its_requests_and_those_that_come_later_go_on(
    where: str,
) -> None:
    async with running_ring() as ring:
        getattr(ring.faults, where).append(ValueError("a shape that does not fit"))
        with structlog.testing.capture_logs() as lines:
            broken = ring.ask(1, num_choices=2, traceparent=TRACEPARENT)
            await ring.until(lambda: bool(ring.endings(broken)))
            later = ring.ask(5)
            await ring.until(lambda: bool(ring.endings(later)))
        (ended,) = ring.ended(broken)
        assert ended.reason == "failed" and ended.failure is not None
        assert (ended.failure.status, ended.failure.code) == (500, "engine_step_failed")
        assert not ended.failure.retryable
        assert (ring.endings(later), len(ring.tokens(later))) == (["length"], 5)
        (line,) = [line for line in lines if line["event"] == "step failed"]
        assert f"{broken.router[:8]}:1" in (line.get("attempts") or [line["attempt"]])
        assert line["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
        stats = ring.device.scheduler.stats()
        assert stats.pages_free == stats.pages_total


async def test_a_newcomer_whose_settings_are_not_taken_fails_alone_and_the_log_says_whose() -> None:
    async with running_ring() as ring:
        ring.faults.forward_errors.append(SlotErrors({0: MemoryError("no room for penalties")}))
        with structlog.testing.capture_logs() as lines:
            attempts = [ring.ask(counter, traceparent=TRACEPARENT) for counter in (1, 2)]
            await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
        refused, neighbour = sorted(attempts, key=ring.endings)  # whoever has got the slot
        (ended,) = ring.ended(refused)
        assert ended.reason == "failed" and ended.failure is not None
        assert (ended.failure.status, ended.failure.code) == (500, "engine_settings_failed")
        assert (ring.endings(neighbour), len(ring.tokens(neighbour))) == (["length"], 5)
        (line,) = [line for line in lines if line["event"] == "step failed"]
        assert line["attempt"] == f"{refused.router[:8]}:{refused.counter}"
        assert "no room for penalties" in str(line["exc_info"])
        stats = ring.device.scheduler.stats()
        assert stats.pages_free == stats.pages_total


async def test_tokens_that_no_message_can_carry_are_told_of_with_their_attempt() -> None:
    async with running_ring() as ring:
        with structlog.testing.capture_logs() as lines:
            attempt = ring.ask(3, header=b"h" * 100, max_tokens=1)
            ring.exchange.max_message_bytes = 10
            await ring.until(lambda: any(line["event"] == "tokens not sent" for line in lines))
        assert {line["attempt"] for line in lines} == {f"{attempt.router[:8]}:3"}


@pytest.mark.parametrize("where", ["forward_errors", "result_errors"])
def test_a_lost_device_ends_the_process_with_status_1_and_without_moving_anything(
    where: str,
) -> None:
    ring = Ring(warmup=False)
    getattr(ring.faults, where).append(FatalError("CUDA error: an illegal memory access"))
    asked: list[AttemptId] = []

    def bind() -> MemoryTransport:
        asked.append(ring.ask(1))
        return ring.transport

    with structlog.testing.capture_logs() as lines:
        assert run_service("compute-0", ring.actor, bind, Watch()) == 1
    ring.exchange.deliver()
    assert ring.endings(asked[0]) == []  # its routers see a death, which counts against it
    (fatal,) = [line for line in lines if line["event"] == "fatal"]
    assert "illegal memory access" in str(fatal["exc_info"])


class InSlices:
    """A device that this thread computes, a slice at a time, until a test lets steps end."""

    def __init__(self, runner: Runner) -> None:
        self._spec = replace(runner.spec(), overlaps=False)
        self.num_slices = 0
        self.ends = False
        self.error: Exception | None = None
        self.forward, self.sample, self.result = runner.forward, runner.sample, runner.result
        self.ready, self.close = runner.ready, runner.close
        self.transfer, self.transferred = runner.transfer, runner.transferred
        self.expert_counters = runner.expert_counters

    def spec(self) -> RunnerSpec:
        return self._spec

    def go_on(self, ticket: Any) -> bool:
        self.num_slices += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.ends


async def start_in_slices() -> tuple[Ring, InSlices, AttemptId]:
    """A service in the middle of a long step."""
    ring = Ring(warmup=False)
    device = InSlices(ring.device.runner)
    ring.use(device)
    await ring.start()
    attempt = ring.ask(1)
    await ring.until(lambda: device.num_slices > 10)
    return ring, device, attempt


async def test_while_a_long_step_is_computed_the_service_lives_and_listens() -> None:
    ring, device, long = await start_in_slices()
    progress = []
    for second in range(1, 4):
        num_beats, num_slices = len(ring.beats), device.num_slices + 10
        await ring.until(partial(lambda least: device.num_slices > least, num_slices))
        ring.actor.tick(time.monotonic() + second)
        await ring.until(partial(lambda least: len(ring.beats) > least, num_beats))
        progress.append(ring.beats[-1].progress)
    assert progress == sorted(set(progress)), "it is not seen to get on"
    other = ring.ask(2)
    ring.abort(other)
    await ring.until(lambda: ring.endings(other) == ["aborted"])
    assert ring.tokens(long) == []
    device.ends = True
    await ring.until(lambda: ring.endings(long) == ["length"])
    assert len(ring.tokens(long)) == 5
    assert ring.actor.longest_block_s == ring.beats[-1].stall_after_s == 5.0
    for block_s, longest_s in ((0.4, 5.0), (1.5, 15.0), (100.0, 60.0)):
        ring.actor._steps.longest_block_s = block_s
        assert ring.actor.longest_block_s == longest_s
    await ring.actor.stop()


async def test_a_stop_does_not_wait_for_the_end_of_a_long_step() -> None:
    ring, device, long = await start_in_slices()
    await asyncio.wait_for(ring.actor.stop(), PATIENCE_S)  # of itself this step never ends
    await ring.until(lambda: ring.endings(long) == ["moved"])
    assert ring.tokens(long) == []
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


async def test_a_step_that_breaks_half_way_fails_its_requests_alone() -> None:
    ring, device, broken = await start_in_slices()
    device.ends, device.error = True, ValueError("a layer without weights")
    await ring.until(lambda: ring.endings(broken) == ["failed"])
    later = ring.ask(2)
    await ring.until(lambda: ring.endings(later) == ["length"])
    assert len(ring.tokens(later)) == 5
    await ring.actor.stop()
