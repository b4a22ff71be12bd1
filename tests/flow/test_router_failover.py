"""Requests that a worker refuses or loses: who gets them next, how long they wait, what is said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog

from common.messages.address import Address
from common.messages.failure import Ending, Failure, Usage
from common.messages.text import AttemptRefused, TextGenerated
from common.messages.tokenize import Tokenize
from common.turns import MAX_STEPS
from services.router.breaker import MAX_FAILURES
from services.router.failover import RetryBudget
from tests.flow.router_ring import (
    CHAT,
    Ring,
    Script,
    add,
    chat,
    error_of,
    events,
    last_counter,
    running_router,
    waiting,
)

DRAINING = Failure(503, "draining", "this worker is stopping", None, True)
FULL = Failure(503, "overloaded", "this worker is full", None, True)


def sent(ring: Ring) -> list[Tokenize]:
    """Return all that was sent round the ring, in order."""
    found = [each for worker in ring.workers.values() for each in worker.of(Tokenize)]
    return sorted(found, key=lambda message: message.attempt.counter)


def refuse(ring: Ring, failure: Failure) -> Address:
    """Refuse the last request at its tokenizer; returns which that was."""
    message = sent(ring)[-1]
    answer = AttemptRefused(message.attempt, message.num_choices, failure)
    ring.workers["tokenizer"].transport.send(ring.transport.address, answer)
    return message.route.tokenizer


@pytest.mark.parametrize("failure", [DRAINING, FULL])
async def test_what_a_tokenizer_refuses_another_one_takes(failure: Failure) -> None:
    async with running_router() as ring:
        await add(ring, "tokenizer")
        ring.script = None
        task = asyncio.ensure_future(_ask(ring, chat(n=3)))
        await ring.until(lambda: sent(ring))
        (first,) = sent(ring)
        refused_by = refuse(ring, failure)
        await ring.until(lambda: len(sent(ring)) == 2)
        again = sent(ring)[-1]
        assert again.route.tokenizer != refused_by
        assert (again.num_choices, again.first_choice) == (3, 0)
        assert (again.prompt, again.sampling) == (first.prompt, first.sampling)
        for counter in range(3):
            ring.text(again.attempt.counter + counter, 0, "a", end="stop")
        status, data = await task
        assert status == 200
        assert len(json.loads(data)["choices"]) == 3
        assert ring.is_empty()


@pytest.mark.parametrize("failure", [DRAINING, FULL])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_compute_refuses_another_one_takes(failure: Failure, stream: bool) -> None:
    async with running_router() as ring:
        await add(ring, "compute")
        ring.script = None
        task = asyncio.ensure_future(_ask(ring, chat(stream=stream)))
        await ring.until(lambda: sent(ring))
        message = sent(ring)[-1]
        ring.refuse_at_compute(message, failure)
        await ring.until(lambda: len(sent(ring)) == 2)
        again = sent(ring)[-1]
        assert again.route.compute != message.route.compute
        ring.text(again.attempt.counter, 0, "a", end="stop")
        assert (await task)[0] == 200


async def test_a_house_that_is_full_everywhere_says_so_at_once() -> None:
    async with running_router(hold_s=10.0) as ring:
        await add(ring, "tokenizer")
        ring.script = None
        task = asyncio.ensure_future(_ask(ring, chat()))
        for number in (1, 2):
            await ring.until(lambda number=number: len(sent(ring)) == number)
            refuse(ring, FULL)
        status, data = await task
        assert (status, error_of(data)["code"]) == (503, "overloaded")
        assert {message.route.tokenizer.endpoint for message in sent(ring)} == {
            "mem://tokenizer",
            "mem://tokenizer2",
        }
        assert ring.is_empty()


async def test_what_is_full_says_how_long_it_will_take_at_the_rate_at_which_others_began() -> None:
    async with running_router() as ring:
        for _ in range(12):  # one begins every five seconds
            assert (await _ask(ring, chat()))[0] == 200
            ring.now_s += 5.0
            ring.beat()
        ring.script = None
        task = asyncio.ensure_future(ring.post(CHAT, chat()).__aenter__())
        await ring.until(lambda: len(sent(ring)) == 13)
        refuse(ring, FULL)
        response = await task
        assert response.status == 503
        assert 4 <= int(response.headers["Retry-After"]) <= 6
        await response.read()


async def test_a_stream_without_a_worker_shows_that_it_lives_and_goes_on_with_the_next() -> None:
    async with running_router(hold_s=10.0) as ring:
        task = await waiting(ring, chat(stream=True))
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        ring.exchange.kill("compute")
        ring.actor.peer_lost(ring.workers["compute"].transport.address)
        for _ in range(60):
            ring.beat("tokenizer", "detokenizer")
            await ring.tick()
        assert not task.done()
        ring.worker("compute", "compute")
        ring.beat("compute")
        await ring.until(lambda: len(sent(ring)) == 2)
        ring.text(last_counter(ring), 1, "b", end="stop")
        status, data = await task
        assert status == 200
        assert 2 <= data.count(b": waiting for a worker\n\n") <= 4
        chunks = events(data.replace(b": waiting for a worker\n\n", b""))
        texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(texts) == "ab"


async def test_a_stream_whose_worker_does_not_come_back_ends_with_an_error() -> None:
    async with running_router(hold_s=3.0) as ring:
        task = await waiting(ring, chat(stream=True))
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        ring.exchange.kill("compute")
        ring.actor.peer_lost(ring.workers["compute"].transport.address)
        for _ in range(40):
            ring.beat("tokenizer", "detokenizer")
            await ring.tick()
        _, data = await task
        assert b'"code": "worker_lost"' in data
        await ring.until(ring.is_empty)


async def test_what_is_lost_waits_until_it_is_known_whether_a_silent_worker_is_lost_too() -> None:
    """As when a network is cut: the second loss within 64 tokens would be poison."""
    async with running_router() as ring:
        await add(ring, "compute")
        task = await waiting(ring, chat(stream=True))
        lost = sent(ring)[0].route.compute
        for _ in range(15):
            ring.beat("tokenizer", "detokenizer")
            await ring.tick()
        ring.exchange.kill(name := lost.endpoint.removeprefix("mem://"))
        ring.actor.peer_lost(lost)
        await ring.tick()
        assert len(sent(ring)) == 1
        other = "compute" if name == "compute2" else "compute2"
        ring.beat(other)
        await ring.settle()
        await ring.tick()
        await ring.until(lambda: len(sent(ring)) == 2)
        assert sent(ring)[-1].route.compute == ring.workers[other].transport.address
        ring.text(last_counter(ring), 0, "b", end="stop")
        assert (await task)[0] == 200


async def test_when_text_is_lost_the_retry_keeps_the_compute_that_has_its_pages() -> None:
    async with running_router(placement="round_robin") as ring:
        await add(ring, "compute", "detokenizer")
        task = await waiting(ring, chat())
        first = sent(ring)[-1]
        ring.text(first.attempt.counter, 0, "a")
        await ring.settle()
        lost = first.route.detokenizer
        ring.exchange.kill(lost.endpoint.removeprefix("mem://"))
        ring.actor.peer_lost(lost)
        await ring.until(lambda: len(sent(ring)) == 2)
        again = sent(ring)[-1]
        assert again.route.compute == first.route.compute
        assert again.route.detokenizer != lost
        await ring.settle()
        stations = {worker.transport.address: name for name, worker in ring.workers.items()}
        assert ring.aborts(stations[first.route.compute]) == [first.attempt.counter]
        task.cancel()


async def test_a_stream_that_the_only_tokenizer_had_no_room_for_goes_on_when_it_has() -> None:
    async with running_router(hold_s=10.0) as ring:
        task = await waiting(ring, chat(stream=True))
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        ring.text(last_counter(ring), 1, "", 0, end="moved")
        await ring.until(lambda: len(sent(ring)) == 2)
        for number in (2, 3, 4):  # it is full three times
            assert len(sent(ring)) == number
            refuse(ring, FULL)
            await ring.settle()
            for _ in range(8):
                ring.beat()
                await ring.tick()
        assert len(sent(ring)) == 5
        ring.text(last_counter(ring), 1, "b", end="stop")
        status, data = await task
        assert status == 200
        assert b"overloaded" not in data and b"[DONE]" in data


async def test_a_choice_without_tokens_does_not_fail_those_that_stream() -> None:
    async with running_router(hold_s=10.0) as ring:
        task = await waiting(ring, chat(stream=True, n=2))
        first = last_counter(ring)
        ring.text(first, 0, "a")
        await ring.settle()
        rows = TextGenerated()
        rows.add(first + 1, 0, [], "")
        rows.end(Ending("refused", Usage(5, 0, 0), None, FULL))
        ring.workers["detokenizer"].transport.send(ring.transport.address, rows)
        await ring.settle()
        assert not task.done()
        ring.text(first, 1, "b", end="stop")
        for _ in range(8):
            ring.beat()
            await ring.tick()
        (again,) = sent(ring)[1:]
        assert (again.num_choices, again.first_choice) == (1, 1)
        ring.text(again.attempt.counter, 0, "c", end="stop")
        status, data = await task
        assert status == 200
        assert b"overloaded" not in data and b"[DONE]" in data


async def test_what_a_worker_leaves_goes_on_in_turns_the_most_advanced_first() -> None:
    async with running_router(hold_s=10.0) as ring:
        await add(ring, "compute")
        task = await waiting(ring, chat(stream=True, n=128))
        first = last_counter(ring)
        for choice in range(128):
            ring.text(first + choice, 0, "a" * (1 + choice), 1 + choice)
        await ring.settle()
        lost = sent(ring)[0].route.compute
        ring.exchange.kill(lost.endpoint.removeprefix("mem://"))
        ring.actor.peer_lost(lost)
        assert len(ring.actor.dispatch.inflight.displaced) >= 64, "all at once"
        await ring.until(lambda: len(sent(ring)) == 129)
        assert [len(message.output_ids) for message in sent(ring)[1:]] == list(range(128, 0, -1))
        task.cancel()


async def test_what_waits_for_its_retry_is_not_passed_by_what_is_less_advanced() -> None:
    class Budget(RetryBudget):
        """Refuses the first that asks, and then no other one."""

        num_asked = 0

        def take(self, now_s: float) -> bool:
            self.num_asked += 1
            return self.num_asked > 1

    async with running_router(hold_s=10.0) as ring:
        await add(ring, "compute")
        task = await waiting(ring, chat(stream=True, n=3))
        first = last_counter(ring)
        for choice in range(3):
            ring.text(first + choice, 0, "a" * (1 + choice), 1 + choice)
        await ring.settle()
        ring.actor.dispatch.fleet.retries = Budget()
        ring.actor.peer_lost(sent(ring)[0].route.compute)
        await ring.settle()
        assert len(sent(ring)) == 1
        ring.beat("tokenizer", "detokenizer", "compute2")
        await ring.tick()
        await ring.until(lambda: len(sent(ring)) == 4)
        assert [len(message.output_ids) for message in sent(ring)[1:]] == [3, 2, 1]
        task.cancel()


async def test_a_look_at_what_waits_is_in_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_router(hold_s=10.0) as ring:
        task = await waiting(ring, chat(stream=True, n=2 * MAX_STEPS))
        first = last_counter(ring)
        for choice in range(2 * MAX_STEPS):
            ring.text(first + choice, 0, "a")
        await ring.settle()
        ring.actor.peer_lost(sent(ring)[0].route.compute)
        await ring.settle(16)
        fleet, looks = ring.actor.dispatch.fleet, []
        of_revision = fleet.of_revision
        monkeypatch.setattr(fleet, "of_revision", lambda card: looks.append(1) or of_revision(card))
        ring.actor.dispatch.recovery.recover()
        assert len(looks) == MAX_STEPS
        await ring.until(lambda: len(looks) == 2 * MAX_STEPS)
        task.cancel()


async def test_what_is_lost_on_its_way_takes_another_way() -> None:
    async with running_router(placement="round_robin") as ring:
        await add(ring, "detokenizer")
        task = await waiting(ring, chat())
        (first,) = sent(ring)
        other = await waiting(ring, chat())  # so that it is the first one's turn again
        ring.text(first.attempt.counter, 7, "x")
        await ring.until(lambda: len(sent(ring)) == 3)
        assert sent(ring)[-1].route.detokenizer != first.route.detokenizer
        task.cancel()
        other.cancel()


async def test_a_replica_that_is_left_alone_is_in_health_and_in_the_log() -> None:
    async def left_alone() -> Any:
        async with ring.session.get("/health") as response:
            return (await response.json())["left_alone"]

    async with running_router() as ring:
        await add(ring, "compute")
        assert await left_alone() == []
        ring.script = None
        broken = Failure(500, "not_finite", "the logits are not finite")
        with structlog.testing.capture_logs() as lines:
            for _ in range(2 * MAX_FAILURES):  # they take turns
                task = await waiting(ring, chat())
                at_second = sent(ring)[-1].route.compute.endpoint == "mem://compute2"
                ring.text(last_counter(ring), 0, "a", end=broken if at_second else "stop")
                assert (await task)[0] == (500 if at_second else 200)
                await ring.tick()
            (alone,) = await left_alone()
            assert 4.0 < alone.pop("seconds") <= 5.0
            assert alone == {"name": "compute2", "failures": MAX_FAILURES, "why": "not_finite"}
            ring.now_s += 5.0
            ring.beat()
            await ring.settle()
            ring.script = Script()
            for _ in range(2):
                assert (await _ask(ring, chat()))[0] == 200
            await ring.tick()
        assert await left_alone() == []
        events = [line["event"] for line in lines if line.get("name") == "compute2"]
        assert events == ["replica left alone", "replica used again"]


async def _ask(ring: Ring, body: dict[str, Any], path: str = CHAT) -> tuple[int, bytes]:
    async with ring.post(path, body) as response:
        return response.status, await response.read()
