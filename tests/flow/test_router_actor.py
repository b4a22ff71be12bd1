"""The router from HTTP to messages and back: clients that leave, questions, lists, and the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from common.messages.address import AttemptId
from common.messages.control import Abort, ModelCard
from common.messages.tokenize import Tokenize
from services.router.listener import QUIET_S
from tests.flow.router_ring import (
    CHAT,
    chat,
    error_of,
    events,
    last_counter,
    running_router,
    waiting,
)

# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_aborted_everywhere(
    stream: bool,
) -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=stream, n=2))
        first = last_counter(ring)
        task.cancel()
        await ring.until(lambda: len(ring.aborts("compute")) == 2)
        assert ring.aborts("tokenizer") == ring.aborts("compute") == [first, first + 1]
        await ring.until(ring.is_empty)


async def test_a_client_that_leaves_in_mid_stream_is_aborted_at_compute() -> None:
    async with running_router() as ring:
        ring.script = None
        asking = asyncio.ensure_future(ring.post(CHAT, chat(stream=True)).__aenter__())
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        counter = last_counter(ring)
        ring.text(counter, 0, "one")
        response = await asking
        response.close()
        await ring.until(ring.is_empty)
        await ring.until(lambda: ring.aborts("compute"))
        (abort,) = ring.workers["compute"].of(Abort)
        assert (abort.attempt, abort.reason) == (AttemptId("router.1", counter), "client_gone")
        assert ring.aborts("tokenizer") == []
        ring.text(counter, 1, "late")
        ring.text(counter, 2, "later", end="stop")
        await ring.settle()
        assert len(ring.workers["compute"].of(Abort)) == 1


async def test_a_client_that_does_not_read_is_dropped_and_aborted() -> None:
    limits = {"slow_client_buffer_bytes": 4096, "slow_client_max_bytes": 4096}
    async with running_router(**limits) as ring:
        ring.script = None
        reader, writer = await asyncio.open_connection("127.0.0.1", ring.actor.port, limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        for index in range(10_000):
            ring.text(last_counter(ring), index, "x" * 50_000)
            await ring.settle(2)
            if ring.aborts("compute"):
                break
        assert ring.aborts("compute") == [last_counter(ring)]
        await ring.until(ring.is_empty)
        writer.close()


# Questions, lists and the end


async def test_tokenize_and_detokenize_ask_the_stages() -> None:
    async with running_router() as ring:
        async with ring.post("/tokenize", {"prompt": "abc", "return_token_strs": True}) as response:
            assert await response.json() == {
                "count": 3,
                "max_model_len": 512,
                "tokens": [1, 2, 3],
                "token_strs": ["a", "b", "c"],
            }
        async with ring.post("/tokenize", chat()) as response:
            assert (await response.json())["token_strs"] is None
        async with ring.post("/detokenize", {"tokens": [1, 2]}) as response:
            assert await response.json() == {"prompt": "text of ids"}
        async with ring.post("/detokenize", {"tokens": []}) as response:
            assert await response.json() == {"prompt": ""}
        assert ring.is_empty()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", chat(chat_template_kwargs=5), "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1000]}, "tokens[0]"),
    ],
)
async def test_a_bad_question_names_its_field(path: str, body: dict[str, Any], param: str) -> None:
    async with running_router() as ring:
        async with ring.post(path, body) as response:
            assert response.status == 400
            assert error_of(await response.read())["param"] == param


async def test_a_question_to_a_dead_worker_fails() -> None:
    async with running_router() as ring:
        ring.script = None

        async def ask() -> int:
            async with ring.post("/tokenize", {"prompt": "a"}) as response:
                status: int = response.status
                return status

        task = asyncio.ensure_future(ask())
        await ring.until(lambda: len(ring.workers["tokenizer"].got) > 1)
        ring.actor.peer_lost(ring.workers["tokenizer"].transport.address)
        assert await task == 503
        await ring.until(ring.is_empty)


async def test_questions_are_bounded() -> None:
    async with running_router(max_in_flight=1) as ring:
        ring.script = None
        task = asyncio.ensure_future(ring.post("/tokenize", {"prompt": "a"}).__aenter__())
        await ring.until(lambda: len(ring.workers["tokenizer"].got) > 1)
        async with ring.post("/detokenize", {"tokens": [1]}) as response:
            assert response.status == 503
        task.cancel()
        await ring.until(ring.is_empty)


async def test_a_question_that_nobody_answers_in_time_is_a_503() -> None:
    async with running_router(query_timeout_s=0.01) as ring:
        ring.script = None
        async with ring.post("/tokenize", {"prompt": "a"}) as response:
            assert response.status == 503
            assert error_of(await response.read())["code"] == "timeout"
        assert ring.is_empty()


async def test_a_question_whose_client_leaves_is_forgotten() -> None:
    async with running_router() as ring:
        ring.script = None
        task = asyncio.ensure_future(ring.post("/tokenize", {"prompt": "a"}).__aenter__())
        await ring.until(lambda: len(ring.workers["tokenizer"].got) > 1)
        task.cancel()
        await ring.until(ring.is_empty)


async def test_the_models_are_those_of_complete_groups() -> None:
    async with running_router() as ring:
        ring.worker("other", "compute", ModelCard("other/model", "rev1", 10, 99))
        ring.beat()
        await ring.settle()
        async with ring.session.get("/v1/models") as response:
            body = await response.json()
        assert [(card["id"], card["max_model_len"]) for card in body["data"]] == [("demo", 512)]
        async with ring.session.get("/v1/models/demo") as response:
            assert (await response.json())["object"] == "model"
        async with ring.session.get("/v1/models/other/model") as response:
            assert response.status == 404
        async with ring.post(CHAT, chat(model="other/model")) as response:
            assert response.status == 503


async def test_health_counts_workers_and_requests() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(n=2))
        async with ring.session.get("/health") as response:
            body = await response.json()
        assert (body["status"], body["missing"]) == ("ok", [])
        assert body["workers"] == {"tokenizer": 1, "compute": 1, "detokenizer": 1}
        assert (body["requests"], body["attempts"], body["queries"]) == (1, 2, 0)
        assert [each["service"] for each in body["instances"]] == list(ring.workers)
        task.cancel()
        await ring.until(ring.is_empty)


async def test_a_draining_router_finishes_what_runs_and_accepts_nobody() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=True))
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        async with ring.session.get("/ready") as response:
            assert response.headers.get("Connection") != "close"
        ring.actor.drain()
        assert not ring.actor.drained
        async with ring.session.get("/ready") as response:  # on a connection that is open
            assert (await response.json())["status"] == "draining"
            assert response.headers["Connection"] == "close"
        with pytest.raises(aiohttp.ClientConnectorError):
            await ring.session.get("/ready")
        ring.text(last_counter(ring), 1, "b", end="stop")
        assert events((await task)[1])[-1]["choices"][0]["finish_reason"] == "stop"
        await ring.tick()
        assert not ring.actor.drained, "the client may have sent its next request"
        await ring.tick(QUIET_S)
        assert ring.actor.drained


async def test_a_draining_router_without_clients_ends_at_once() -> None:
    async with running_router() as ring:
        ring.actor.drain()
        assert ring.actor.drained


async def test_requests_on_open_connections_are_served_while_a_router_drains() -> None:
    async with running_router() as ring:
        async with ring.session.get("/live"):
            pass
        ring.actor.drain()
        async with ring.post(CHAT, chat()) as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
        await ring.until(lambda: ring.actor.drained)


async def test_stopping_ends_open_streams_with_an_error_event() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=True))
        ring.text(last_counter(ring), 0, "a")
        await ring.settle()
        await ring.actor.stop()
        assert events((await task)[1])[-1]["error"]["code"] == "draining"
        await ring.settle()
        assert ring.aborts("compute") == [last_counter(ring)]
        with pytest.raises(aiohttp.ClientConnectorError):
            async with ring.post(CHAT, chat()):
                pass
