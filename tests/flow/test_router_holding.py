"""Requests that no worker can take yet: how long they wait, who gives up a place, who is first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from common.messages.tokenize import Tokenize
from tests.flow.router_ring import CARD, CHAT, TEXT, Ring, chat, error_of, running_router


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})]
)
async def test_a_request_waits_for_workers_that_are_still_to_come(
    path: str, body: dict[str, Any]
) -> None:
    async with running_router(workers=False, hold_s=10.0) as ring:
        task = asyncio.ensure_future(_ask(ring, body, path))
        await ring.until(lambda: ring.actor.dispatch.num_handlers)
        for _ in range(50):
            await ring.tick()
        assert not task.done()
        for service in ("tokenizer", "compute", "detokenizer"):
            ring.worker(service, service)
            ring.beat(service)
        assert (await task)[0] == 200


async def test_a_wait_ends_with_a_503_that_says_how_long_there_has_been_nobody() -> None:
    async with running_router(workers=False, hold_s=3.0) as ring:
        async with asyncio.timeout(60):
            task = asyncio.ensure_future(ring.post(CHAT, chat()).__aenter__())
            await ring.until(lambda: ring.actor.dispatch.num_handlers)
            for _ in range(29):
                await ring.tick()
            assert not task.done()
            for _ in range(2):
                await ring.tick()
            response = await task
        assert (response.status, response.headers["Retry-After"]) == (503, "4")
        assert error_of(await response.read())["code"] == "no_worker"
        response.close()
        await ring.until(ring.is_empty)


async def test_no_more_requests_wait_than_may_be_in_flight() -> None:
    async with running_router(workers=False, hold_s=10.0, max_in_flight=1) as ring:
        task = asyncio.ensure_future(_ask(ring, chat()))
        await ring.until(lambda: ring.actor.dispatch.num_handlers)
        await ring.settle(50)
        assert (await _ask(ring, chat()))[0] == 503
        ring.actor.drain()
        await ring.tick()
        status, data = await task
        assert (status, error_of(data)["code"]) == (503, "draining")


KEYS = [{"Authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b")]


async def test_who_waits_gives_up_places_to_others_and_they_go_on_in_turns() -> None:
    keys = ("key-of-a", "key-of-b")
    async with running_router(workers=False, hold_s=10.0, max_in_flight=4, api_keys=keys) as ring:
        admission = ring.actor.dispatch.admission
        tasks = []
        for number, key in enumerate((0, 0, 0, 0, 1)):
            body = chat(seed=number)
            tasks.append(
                asyncio.ensure_future(ring.post(CHAT, body, headers=KEYS[key]).__aenter__())
            )
            if number < 4:
                await ring.until(lambda number=number: admission.num_requests == number + 1)
        refused = await tasks.pop(3)
        assert (refused.status, error_of(await refused.read())["code"]) == (503, "overloaded")
        assert admission.num_requests == 4
        for service in ("tokenizer", "compute", "detokenizer"):
            ring.worker(service, service)
            ring.beat(service)
        responses = await asyncio.gather(*tasks)
        assert [response.status for response in responses] == [200] * 4
        assert [message.sampling.seed for message in ring.workers["tokenizer"].of(Tokenize)] == [
            0,
            4,
            1,
            2,
        ]
        for response in responses:
            await response.read()
        await ring.until(ring.is_empty)


async def _ask(ring: Ring, body: dict[str, Any], path: str = CHAT) -> tuple[int, bytes]:
    async with ring.post(path, body) as response:
        return response.status, await response.read()


async def test_a_request_waits_longer_for_a_model_that_loads_than_for_one_that_is_lost() -> None:
    async with running_router(workers=False, hold_s=1.0, load_s=5.0) as ring:
        for service in ("tokenizer", "compute", "detokenizer"):
            ring.worker(service, service)
        coming = replace(CARD, loading=True)
        ring.beat("tokenizer", "detokenizer")
        task = asyncio.ensure_future(_ask(ring, chat()))
        await ring.until(lambda: [place.model for place in ring.actor.dispatch.holds] == ["demo"])
        ring.beat("compute", model=coming, draining=True, stall_after_s=60.0)
        for _ in range(40):
            await ring.tick()
            ring.beat("tokenizer", "detokenizer")
        assert not task.done()
        ring.beat("compute")
        assert (await task)[0] == 200
        await ring.until(ring.is_empty)


async def test_a_model_goes_down_to_no_compute_and_back_while_its_requests_wait() -> None:
    async with running_router(hold_s=1.0, wake_s=60.0) as ring:
        ring.beat("compute", draining=True)
        await ring.settle()
        ring.actor.peer_lost(ring.workers["compute"].transport.address)
        assert (await _status(ring)) == ("asleep", 200, "asleep")
        task = asyncio.ensure_future(_ask(ring, chat()))
        await ring.until(lambda: len(ring.actor.dispatch.holds))
        for _ in range(30):
            await ring.tick()
            ring.beat("tokenizer", "detokenizer")
        assert not task.done()
        ring.worker("another", "compute")
        ring.beat("another")
        assert (await task)[0] == 200
        assert (await _status(ring)) == ("loaded", 200, "ok")


async def _status(ring: Ring) -> tuple[str, int, str]:
    async with ring.session.get("/v1/models/demo") as response:
        status = (await response.json())["status"]
    async with ring.session.get("/ready") as response:
        return status, response.status, (await response.json())["status"]
