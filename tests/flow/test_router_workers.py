"""Workers that come, die, hang and restart, as the router sees them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import structlog

from common.link.codec import SPOKEN
from common.link.shapes import Shapes
from common.messages.address import PROTOCOL_VERSION
from common.messages.arrays import int64s
from common.messages.control import Abort, Load, OtherProtocol, RouterAlive
from common.messages.failure import Failure
from common.messages.generate import Generate
from common.messages.tokenize import Tokenize
from services.router.groups import SERVICES
from tests import old_release
from tests.flow.router_ring import (
    CARD,
    CHAT,
    TEXT,
    Script,
    ask,
    chat,
    error_of,
    events,
    last_counter,
    next_beat,
    running_router,
    waiting,
)


async def test_without_workers_requests_wait_for_nobody() -> None:
    async with running_router(workers=False) as ring:
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        async with ring.session.get("/ready") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            body = await response.json()
            assert body["missing"] == ["tokenizer", "compute", "detokenizer"]
        async with ring.session.get("/live") as response:
            assert response.status == 200
        assert not ring.actor.ready


async def test_heartbeats_are_answered() -> None:
    async with running_router() as ring:
        ring.beat()
        await ring.settle()
        for worker in ring.workers.values():
            assert [answer.beat for answer in worker.of(RouterAlive)] == [1, 2]


async def test_requests_are_spread_over_the_workers() -> None:
    async with running_router(placement="round_robin") as ring:
        ring.worker("tokenizer2", "tokenizer")
        ring.worker("detokenizer2", "detokenizer")
        ring.worker("compute2", "compute")
        ring.beat()
        await ring.settle()
        for _ in range(4):
            async with ring.post(CHAT, chat()) as response:
                assert response.status == 200
        assert len(ring.workers["tokenizer"].of(Tokenize)) == 2
        messages = ring.workers["tokenizer"].of(Tokenize)
        messages += ring.workers["tokenizer2"].of(Tokenize)
        for station in ("compute", "detokenizer"):
            names = [getattr(message.route, station).endpoint for message in messages]
            assert sorted(names) == sorted([f"mem://{station}", f"mem://{station}2"] * 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_compute_ends_its_requests_and_a_new_one_serves_again(stream: bool) -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=stream))
        counter = last_counter(ring)
        ring.text(counter, 0, "a")
        await ring.settle()
        ring.exchange.kill("compute")
        for _ in range(30):
            ring.beat("tokenizer", "detokenizer", open_counters=int64s([counter]))
            await ring.tick()
        status, data = await task
        if stream:
            assert status == 200
            assert events(data)[-1]["error"]["code"] == "worker_lost"
        else:
            assert (status, error_of(data)["code"]) == (503, "worker_lost")
        assert set(ring.aborts("detokenizer")) == {counter}
        await ring.until(ring.is_empty)
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
        ring.worker("compute", "compute")
        ring.beat()
        await ring.settle()
        ring.script = Script()
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 200


async def test_a_restarted_worker_goes_on_with_the_requests_of_its_former_life() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat())
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        ring.exchange.kill("compute")
        ring.worker("compute", "compute")
        ring.beat("compute")
        await ring.settle()
        first, retry = ring.workers["tokenizer"].of(Tokenize)
        assert retry.route.compute == ring.workers["compute"].transport.address
        assert (list(retry.output_ids), retry.accepted_characters) == ([7], 1)
        assert (retry.sampling, retry.admitted_at_s) == (first.sampling, first.admitted_at_s)
        ring.text(retry.attempt.counter, 1, "b", end="stop")
        status, data = await task
        assert status == 200
        answer = json.loads(data)
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert answer["usage"]["completion_tokens"] == 2


async def test_a_worker_that_takes_no_mail_is_given_up_long_before_its_lease() -> None:
    async with running_router() as ring:
        ring.beat(stall_after_s=60.0)
        await ring.settle()
        task = await waiting(ring, chat())
        ring.exchange.kill("compute")
        with structlog.testing.capture_logs() as lines:
            for _ in range(50):
                ring.beat("tokenizer", "detokenizer", stall_after_s=60.0)
                await ring.tick()
        assert (await task)[0] == 503
        (lost,) = [line for line in lines if line["event"] == "worker lost"]
        assert lost["why"] == "its messages do not leave"


async def test_a_worker_in_a_long_step_keeps_its_requests() -> None:
    async with running_router() as ring:
        ring.beat(stall_after_s=60.0)
        await ring.settle()
        task = await waiting(ring, chat())
        for _ in range(100):
            ring.beat("tokenizer", "detokenizer", stall_after_s=60.0)
            await ring.tick()
        ring.text(last_counter(ring), 0, "a", end="stop")
        assert (await task)[0] == 200


async def test_after_a_gap_in_the_rows_the_request_is_tried_again() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat())
        first = last_counter(ring)
        ring.text(first, 0, "a")
        with structlog.testing.capture_logs() as lines:
            ring.text(first, 2, "c")
            await ring.until(lambda: last_counter(ring) != first)
        (line,) = [line for line in lines if line["event"] == "rows lost"]
        assert line["attempt"] == f"{ring.transport.address.instance_id[:8]}:{first}"
        (abort,) = ring.workers["compute"].of(Abort)
        assert (abort.attempt.counter, abort.reason) == (first, "lost")
        ring.text(last_counter(ring), 1, "b", end="stop")
        status, data = await task
        assert (status, json.loads(data)["choices"][0]["message"]["content"]) == (200, "ab")


async def test_an_attempt_at_no_stage_is_given_up_after_two_beats() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat())
        first = last_counter(ring)
        for _ in range(4):
            await ring.tick(0.5)
            ring.beat(open_counters=int64s([first]))
            await ring.settle()
        assert last_counter(ring) == first
        for _ in range(8):  # two of tokenizer and compute, then two of the detokenizer
            await ring.tick(0.5)
            ring.beat()
            await ring.settle()
        assert last_counter(ring) != first
        ring.text(last_counter(ring), 0, "a", end="stop")
        assert (await task)[0] == 200


async def test_an_unknown_attempt_is_aborted_when_it_is_listed_twice() -> None:
    async with running_router() as ring:
        ring.beat("compute", open_counters=int64s([77]))
        await ring.settle()
        assert ring.aborts("compute") == []
        ring.beat("compute", open_counters=int64s([77, 78]))
        await ring.settle()
        (abort,) = ring.workers["compute"].of(Abort)
        assert (abort.attempt.counter, abort.reason) == (77, "unknown")


async def test_a_heartbeat_in_anothers_name_is_not_believed() -> None:
    async with running_router() as ring:
        ring.beat("compute", address=ring.workers["tokenizer"].transport.address)
        await ring.settle()
        assert len(ring.workers["tokenizer"].of(RouterAlive)) == 1


async def test_a_replaced_workers_late_heartbeat_is_neither_believed_nor_answered() -> None:
    async with running_router() as ring:
        former = ring.workers["compute"]
        late = next_beat(former)
        ring.exchange.kill("compute")
        successor = ring.worker("compute", "compute")
        ring.beat("compute")
        await ring.settle()
        with structlog.testing.capture_logs() as lines:
            ring.actor.receive(late, former.transport.address)
            await ring.settle()
        assert lines == []
        assert len(successor.of(RouterAlive)) == 1
        assert successor.transport.stats().num_misaddressed == 0
        assert ring.actor.ready


async def test_the_log_names_the_worker_that_was_lost() -> None:
    async with running_router() as ring:
        ring.exchange.kill("compute")
        ring.worker("compute", "compute")
        with structlog.testing.capture_logs() as lines:
            ring.beat("compute")
            await ring.settle()
        (lost,) = [line for line in lines if line["event"] == "worker lost"]
        assert (lost["endpoint"], lost["why"]) == ("mem://compute", "replaced")


async def test_a_worker_of_another_protocol_is_left_out_and_told() -> None:
    after_next = {PROTOCOL_VERSION + apart: Shapes({}) for apart in (1, 2)}
    async with running_router(workers=False) as ring:
        for service in SERVICES:
            ring.worker(service, service, spoken=SPOKEN if service == "compute" else after_next)
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                ring.beat()
                await ring.settle()
        assert not ring.actor.ready
        refusal = OtherProtocol(PROTOCOL_VERSION, "router_alive")
        for service in ("tokenizer", "detokenizer"):
            assert ring.workers[service].got == [refusal] * 3
        said = [line for line in lines if "another protocol" in line["event"]]
        assert len(said) == 3, "the router and both workers say it once a minute"
        assert said[0]["sender"] == "mem://tokenizer"
        assert said[0]["version"] == PROTOCOL_VERSION + 1
        assert said[0]["understood"] == [PROTOCOL_VERSION - 1, PROTOCOL_VERSION]
        async with ring.session.get("/ready") as response:
            assert response.status == 503
            refused = (await response.json())["refused"]
        assert set(refused) == {"tokenizer", "detokenizer"}
        assert refused["tokenizer"] == (
            f"it writes protocol {PROTOCOL_VERSION + 1}, this router reads "
            f"{PROTOCOL_VERSION - 1} and {PROTOCOL_VERSION}; "
            "run releases that are next to each other"
        )


async def test_a_worker_of_the_next_release_waits_until_those_of_the_last_have_gone() -> None:
    following = {PROTOCOL_VERSION + apart: Shapes({}) for apart in (0, 1)}
    async with running_router(workers=False) as ring:
        ring.worker("old", "compute", spoken=old_release.SPOKEN)
        ring.worker("new", "compute", spoken=following)
        ring.beat("old")
        await ring.settle()
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                ring.beat("new")
                await ring.settle()
        (said,) = [line for line in lines if line["event"] == "worker refused"]
        assert said["endpoint"] == "mem://new"
        assert said["why"] == (
            f"protocol {PROTOCOL_VERSION + 1} is too far from old's; "
            "run releases that are next to each other"
        )
        assert ring.workers["new"].got == []
        ring.actor.peer_lost(ring.workers["old"].transport.address)
        ring.beat("new")
        await ring.settle()
        assert ring.workers["new"].got == [RouterAlive(ring.transport.address, 4)]


async def test_a_prompt_that_is_too_long_for_one_compute_goes_on_to_a_longer_one() -> None:
    """Before a text is tokenized its length is an estimate."""
    async with running_router() as ring:
        longer = replace(CARD, max_model_len=4096, max_input_length=4095)
        ring.worker("longer", "compute", longer)
        ring.beat()
        ring.beat("longer", load=Load(63, 0, 64))  # what fits both goes to the other
        await ring.settle()
        task = await waiting(ring, {"prompt": "short", "max_tokens": 8}, TEXT)
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        assert message.limits.max_model_len == 512
        too_long = Failure(400, "context_length_exceeded", "600 tokens", "prompt", False, 600, 511)
        ring.refuse(message, too_long)
        await ring.until(lambda: len(ring.workers["tokenizer"].of(Tokenize)) == 2)
        again = ring.workers["tokenizer"].of(Tokenize)[1]
        assert again.route.compute == ring.workers["longer"].transport.address
        assert again.limits.max_model_len == 4096
        ring.refuse(again, replace(too_long, prompt_tokens=5000, most_prompt_tokens=4095))
        assert (await task)[0] == 400


async def test_a_request_whose_length_is_known_goes_where_it_fits_at_once() -> None:
    async with running_router() as ring:
        ring.worker("longer", "compute", replace(CARD, max_model_len=4096, max_input_length=4095))
        ring.beat()
        ring.beat("longer", load=Load(63, 0, 64))
        await ring.settle()
        await ask(ring, TEXT, {"prompt": [7] * 500, "max_tokens": 100})
        assert len(ring.workers["longer"].of(Generate)) == 1
