"""What a compute service does when its device or its links fail."""

from __future__ import annotations

import pytest
import structlog

from common.errors import FatalError
from common.messages.address import AttemptId
from common.service import Watch, run_service
from services.compute.runner.protocol import SlotErrors
from tests.flow.compute_ring import Ring, running_ring
from tests.memory_link import MemoryTransport

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
