"""Requests that take too long: for their client, or for this server before their first token."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from common.messages.control import Load
from common.messages.tokenize import Tokenize, TokenizeQuery
from tests.flow.router_ring import (
    CHAT,
    TEXT,
    Ring,
    chat,
    error_of,
    events,
    last_counter,
    running_router,
    waiting,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "completions": (TEXT, {"prompt": "a"}),
    "responses": ("/v1/responses", {"input": "a"}),
    "messages": ("/v1/messages", {"model": "demo", "max_tokens": 9, "messages": MESSAGES}),
    "ollama": ("/api/chat", {"model": "demo", "messages": MESSAGES}),
}
ERRORS = {  # of a stream that has begun
    "chat": b'"code": "timeout"',
    "completions": b'"code": "timeout"',
    "responses": b"response.failed",
    "messages": b'"type":"timeout_error"',
    "ollama": b'{"error":"the request took longer',
}


async def pass_time(ring: Ring, seconds: float) -> None:
    """Let time pass at a router whose workers live."""
    for _ in range(round(seconds * 10)):
        ring.beat(caught_up=False)  # else what they do not list would be lost, and retried
        await ring.tick()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_a_token_ends_with_a_408_at_its_timeout(
    api: str, stream: bool
) -> None:
    async with running_router() as ring:
        path, body = APIS[api]
        ring.script = None
        response = asyncio.ensure_future(
            ring.post(path, {**body, "stream": stream, "timeout": 1.5}).__aenter__()
        )
        await ring.until(lambda: ring.actor.dispatch.inflight.num_requests)
        await pass_time(ring, 1.4)
        assert not response.done()
        counter = last_counter(ring)
        await pass_time(ring, 0.2)
        got = await response
        assert (got.status, got.headers["X-Should-Retry"]) == (408, "false")
        assert "Retry-After" not in got.headers
        assert b"took longer" in await got.read()
        await ring.until(ring.is_empty)
        assert ring.aborts("tokenizer") == ring.aborts("compute") == [counter]


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_that_has_begun_ends_with_an_error_at_its_timeout(api: str) -> None:
    async with running_router() as ring:
        path, body = APIS[api]
        task = await waiting(ring, {**body, "stream": True, "timeout": 1.5}, path)
        ring.text(last_counter(ring), 0, "a")
        await pass_time(ring, 1.4)
        ring.text(last_counter(ring), 1, "b")
        await ring.settle()
        assert not task.done()
        await pass_time(ring, 0.2)
        status, data = await task
        assert status == 200
        assert ERRORS[api] in data.split(b"a", 1)[1]
        await ring.until(ring.is_empty)
        assert ring.aborts("compute") == [last_counter(ring)]
        assert ring.actor.dispatch.inflight.stats["demo"].num_finished["abort"] == 1


async def test_an_error_of_a_timeout_has_openais_shape() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(timeout=1))
        await pass_time(ring, 1.1)
        status, data = await task
        assert (status, error_of(data)["code"]) == (408, "timeout")


async def test_openais_client_does_not_ask_again_after_a_timeout() -> None:
    async with running_router() as ring:
        ring.script = None
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{ring.actor.port}/v1", api_key="-")
        body = {"timeout": 1}
        task = asyncio.ensure_future(
            client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=body)
        )
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        await pass_time(ring, 1.1)
        with pytest.raises(openai.APIStatusError) as caught:
            await task
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        assert len(ring.workers["tokenizer"].of(Tokenize)) == 1
        await client.close()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("timeout", [0, -1.0, "5", True])
async def test_a_timeout_is_a_number_above_0(api: str, timeout: Any) -> None:
    async with running_router() as ring:
        path, body = APIS[api]
        async with ring.post(path, {**body, "timeout": timeout}) as response:
            assert response.status == 400
            assert b"timeout" in await response.read()


async def test_a_request_that_ends_in_time_is_not_touched() -> None:
    async with running_router(max_wait_s=1.0) as ring:
        task = await waiting(ring, chat(timeout=1.0))
        ring.text(last_counter(ring), 0, "a", end="stop")
        assert (await task)[0] == 200
        await pass_time(ring, 2.0)
        assert not any(ring.aborts(name) for name in ring.workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_no_token_after_max_wait_s_is_refused(stream: bool) -> None:
    async with running_router(max_wait_s=1.0) as ring:
        ring.script = None
        response = asyncio.ensure_future(ring.post(CHAT, chat(stream=stream)).__aenter__())
        await ring.until(lambda: ring.actor.dispatch.inflight.num_requests)
        await pass_time(ring, 0.9)
        assert not response.done()
        await pass_time(ring, 0.2)
        got = await response
        assert got.status == 503 and int(got.headers["Retry-After"]) >= 1
        error = error_of(await got.read())
        assert error["code"] == "overloaded" and "max_wait_s" in error["message"]
        await ring.until(ring.is_empty)
        assert ring.aborts("compute") == [last_counter(ring)]


async def test_an_answer_of_which_one_choice_has_a_token_does_not_wait_any_more() -> None:
    async with running_router(max_wait_s=1.0) as ring:
        task = await waiting(ring, chat(stream=True, n=2))
        first = last_counter(ring)
        ring.text(first, 0, "a")
        await pass_time(ring, 5.0)
        for counter in (first, first + 1):
            ring.text(counter, int(counter == first), "b", end="stop")
        status, data = await task
        assert status == 200 and len(events(data)) > 3


@pytest.mark.parametrize(
    ("settings", "body", "status"),
    [({}, chat(timeout=1.0), 408), ({"max_wait_s": 1.0}, chat(), 503)],
)
async def test_waiting_for_a_worker_counts(
    settings: dict[str, Any], body: dict[str, Any], status: int
) -> None:
    async with running_router(workers=False, hold_s=10.0, **settings) as ring:
        response = asyncio.ensure_future(ring.post(CHAT, body).__aenter__())
        await ring.until(lambda: ring.actor.dispatch.num_handlers)
        await ring.settle(50)
        for _ in range(11):
            await ring.tick()
        got = await response
        assert got.status == status
        await got.read()


async def test_inputs_of_embeddings_that_follow_an_answered_part_do_not_wait_for_their_first() -> (
    None
):
    async with running_router(max_wait_s=1.0) as ring:
        for worker in ring.workers.values():
            worker.card = replace(worker.card, pooling="last")
        ring.beat()
        await ring.settle()
        body = {"input": ["a"] * 257, "timeout": 3.0}
        task = await waiting(ring, body, "/v1/embeddings")
        await ring.until(lambda: last_counter(ring) == 255)
        for counter in range(256):
            ring.text(counter, 0, "", 0, end="stop")
        await ring.until(lambda: last_counter(ring) >= 256)
        await pass_time(ring, 2.0)
        assert not task.done()
        await pass_time(ring, 1.2)
        status, data = await task
        assert (status, error_of(data)["code"]) == (408, "timeout")
        await ring.until(ring.is_empty)


async def test_what_would_begin_too_late_is_refused_at_once_and_clients_count_in_turns() -> None:
    keys = {name: {"Authorization": f"Bearer key-of-{name}"} for name in "ab"}

    async def post(name: str) -> aiohttp.ClientResponse:
        return await ring.post(CHAT, chat(), headers=keys[name]).__aenter__()

    async with running_router(max_ttft_s=4.0, api_keys=("key-of-a", "key-of-b")) as ring:
        for _ in range(12):  # one begins every second
            assert (await post("a")).status == 200
            ring.now_s += 1.0
        ring.script = None
        inflight = ring.actor.dispatch.inflight
        tasks = []
        for number in range(6):  # as long as compute has no queue, all may come
            tasks.append(asyncio.ensure_future(post("a")))
            await ring.until(lambda number=number: inflight.num_requests == number + 1)
        ring.beat("compute", load=Load(64, 6, 64))
        await ring.settle()
        async with ring.post(CHAT, chat(), headers=keys["a"]) as refused:
            assert refused.status == 503
            assert 2 <= int(refused.headers["Retry-After"]) <= 5
            error = error_of(await refused.read())
            assert error["code"] == "overloaded" and "max_ttft_s" in error["message"]
        tasks.append(asyncio.ensure_future(post("b")))
        await ring.until(lambda: inflight.num_requests == 7)
        for task in tasks:
            task.cancel()
        await ring.until(ring.is_empty)


async def test_an_echo_that_is_tokenized_first_ends_at_its_timeout() -> None:
    async with running_router() as ring:
        ring.script = None
        body = {"prompt": "a", "echo": True, "max_tokens": 0, "timeout": 0.05}
        task = asyncio.ensure_future(_ask(ring, body, TEXT))
        await ring.until(lambda: ring.workers["tokenizer"].of(TokenizeQuery))
        status, data = await task
        assert (status, json.loads(data)["error"]["code"]) == (408, "timeout")
        assert ring.is_empty()


async def _ask(ring: Ring, body: dict[str, Any], path: str) -> tuple[int, bytes]:
    async with ring.post(path, body) as response:
        return response.status, await response.read()
