"""The router from HTTP to mail and back, over the in-memory links."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from common.messages.address import AttemptId
from common.messages.arrays import int64s
from common.messages.control import Abort, ModelCard, RouterAlive
from common.messages.failure import Failure
from common.messages.text import Candidate, TokenLogprob
from common.messages.tokenize import IdsPrompt, TextPrompt, Tokenize
from tests.flow.router_ring import Ring, Script, chat, events, running_router

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def _waiting(ring: Ring, body: dict[str, Any], path: str = CHAT) -> asyncio.Task[Any]:
    """Post a request that the ring leaves unanswered, and wait until it is on the ring."""
    ring.script = None
    known = len(ring.workers["tokenizer"].of(Tokenize))

    async def ask() -> tuple[int, bytes]:
        async with ring.post(path, body) as response:
            return response.status, await response.read()

    task = asyncio.ensure_future(ask())
    await ring.until(lambda: len(ring.workers["tokenizer"].of(Tokenize)) > known)
    return task


def _last(ring: Ring) -> int:
    """Return the counter of the attempt that came last."""
    message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
    return message.attempt.counter


def _error(data: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(data)
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    return error


# Answers


async def test_a_chat_request_is_answered_in_one_piece() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, chat()) as response:
            body = await response.json()
        assert response.status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert body["usage"]["total_tokens"] == 7
        assert ring.is_empty()


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done() -> None:
    async with running_router() as ring:
        body = chat(stream=True, stream_options={"include_usage": True})
        async with ring.post(CHAT, body) as response:
            data = await response.read()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        first, *deltas, finish, usage = events(data)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(each["choices"][0]["delta"]["content"] for each in deltas) == "Hello"
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert finish["usage"] is None
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        await ring.until(ring.is_empty)


async def test_text_streams_as_it_comes() -> None:
    async with running_router() as ring:
        ring.script = None
        asking = asyncio.ensure_future(ring.post(CHAT, chat(stream=True)).__aenter__())
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        ring.text(_last(ring), 0, "one")
        response = await asking
        assert b'"content":"one"' in await response.content.readany()
        ring.text(_last(ring), 1, "two")
        assert b'"content":"two"' in await response.content.readany()
        ring.text(_last(ring), 2, "", num_tokens=0, end="length")
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_no_header_leaves_before_the_first_mail() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=True))
        refusal = Failure(400, "context_length_exceeded", "messages: too long", "messages")
        ring.refuse(ring.workers["tokenizer"].of(Tokenize)[-1], refusal)
        status, data = await task
        assert status == 400
        assert _error(data)["param"] == "messages"
        assert _error(data)["code"] == "context_length_exceeded"
        await ring.until(ring.is_empty)


async def test_several_choices_are_one_message_and_share_the_prompts_usage() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, chat(n=3)) as response:
            body = await response.json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["completion_tokens"] == 6
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        assert message.num_choices == 3


async def test_every_prompt_of_a_batch_has_its_own_message_and_field() -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": ["a", [1, 2]], "n": 2}
        async with ring.post(TEXT, body) as response:
            choices = (await response.json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        first, second = ring.workers["tokenizer"].of(Tokenize)
        assert isinstance(first.prompt, TextPrompt) and isinstance(second.prompt, IdsPrompt)
        assert (first.prompt_field, second.prompt_field) == ("prompt[0]", "prompt[1]")
        assert second.attempt.counter == first.attempt.counter + 2
        assert first.sampling.seed != second.sampling.seed


async def test_a_given_seed_travels_and_a_missing_one_is_drawn() -> None:
    async with running_router() as ring:
        for body in (chat(seed=42), chat(), chat()):
            async with ring.post(CHAT, body) as response:
                assert response.status == 200
        seeds = [message.sampling.seed for message in ring.workers["tokenizer"].of(Tokenize)]
        assert seeds[0] == 42
        assert seeds[1] != seeds[2]
        assert all(0 <= seed < 1 << 63 for seed in seeds)


async def test_the_itinerary_and_the_limits_are_stamped_on_the_request() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 200
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        way = message.itinerary
        assert way.tokenizer == ring.workers["tokenizer"].mail.address
        assert way.compute == ring.workers["compute"].mail.address
        assert way.detokenizer == ring.workers["detokenizer"].mail.address
        assert way.reply == ring.mail.address
        assert message.limits.max_model_len == 512


async def test_completion_logprobs_have_the_old_shape() -> None:
    def token(index: int) -> TokenLogprob:
        chosen = Candidate(index, "Hello"[index * 3 :][:3], b"abc"[: 3 - index], -0.5)
        return TokenLogprob(chosen, (chosen,))

    async with running_router() as ring:
        ring.script = Script(logprobs=token)
        body = {"model": "demo", "prompt": "a", "logprobs": 1}
        async with ring.post(TEXT, body) as response:
            (choice,) = (await response.json())["choices"]
        assert choice["logprobs"] == {
            "tokens": ["Hel", "lo"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"Hel": -0.5}, {"lo": -0.5}],
            "text_offset": [0, 3],
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_text(stream: bool) -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": ["Say: ", [1, 2]], "echo": True, "stream": stream}
        async with ring.post(TEXT, body) as response:
            data = await response.read()
        chunks = events(data) if stream else [json.loads(data)]
        texts = {0: "", 1: ""}
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "Say: Hello", 1: "text of idsHello"}


async def test_a_failure_in_mid_stream_is_an_error_event_before_done() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=True, n=2))
        first = _last(ring)
        ring.text(first, 0, "a")
        await ring.settle()
        ring.text(first, 1, "", end=Failure(500, "not_finite", "the logits are not finite"))
        status, data = await task
        assert status == 200
        *_, error = events(data)
        assert error["error"]["code"] == "not_finite"
        assert ring.aborts("compute") == [first + 1]
        await ring.until(ring.is_empty)


async def test_a_failure_of_a_waiting_request_is_its_status() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat())
        ring.text(_last(ring), 0, "a")
        ring.text(_last(ring), 1, "", end=Failure(503, "full", "full", None, True))
        status, data = await task
        assert (status, _error(data)["code"]) == (503, "full")


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_aborted_everywhere(
    stream: bool,
) -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=stream, n=2))
        first = _last(ring)
        task.cancel()
        await ring.until(lambda: len(ring.aborts("compute")) == 2)
        assert ring.aborts("tokenizer") == ring.aborts("compute") == [first, first + 1]
        await ring.until(ring.is_empty)


async def test_a_client_that_leaves_in_mid_stream_is_aborted_at_compute() -> None:
    async with running_router() as ring:
        ring.script = None
        asking = asyncio.ensure_future(ring.post(CHAT, chat(stream=True)).__aenter__())
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        counter = _last(ring)
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
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await ring.until(lambda: ring.workers["tokenizer"].of(Tokenize))
        for index in range(10_000):
            ring.text(_last(ring), index, "x" * 50_000)
            await ring.settle(2)
            if ring.aborts("compute"):
                break
        assert ring.aborts("compute") == [_last(ring)]
        await ring.until(ring.is_empty)
        writer.close()


# Connections


async def _raw(ring: Ring, *requests: bytes, until: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", ring.actor.port)
    writer.write(b"".join(requests))
    data = b""
    while until not in data:
        more = await reader.read(65536)
        if not more:
            break
        data += more
    writer.close()
    return data


def _request(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def test_the_connection_of_a_stream_serves_the_next_request() -> None:
    async with running_router() as ring:
        ports = set()
        for _ in range(3):
            async with ring.post(CHAT, chat(stream=True)) as response:
                ports.add(response.connection.transport.get_extra_info("sockname"))
                events(await response.read())
        assert len(ports) == 1


async def test_pipelined_streams_come_one_after_the_other() -> None:
    async with running_router() as ring:
        probe = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
        stream = _request(chat(stream=True))
        data = await _raw(ring, stream, stream, probe, until=b'{"status":"ok"}')
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 2


async def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_the_connection() -> None:
    async with running_router() as ring:
        data = await _raw(ring, _request(chat(stream=True), "1.0"), until=b"never")
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert events(body)[0]["object"] == "chat.completion.chunk"


async def test_a_request_id_is_echoed_or_made() -> None:
    async with running_router() as ring:
        headers = {"X-Request-Id": "mine-1"}
        for body in (chat(), chat(stream=True), {"bad": 1}):
            async with ring.post(CHAT, body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine-1"
        async with ring.session.get("/live") as response:
            assert response.headers["X-Request-Id"].startswith("req_")


# Refusals


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "invalid_json"),
        ({"data": b"{}"}, 415, "unsupported_media_type"),
        ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_media_type"),
        (
            {
                "data": b"x",
                "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"},
            },
            415,
            "unsupported_media_type",
        ),
        ({"json": {"model": "demo", "messages": [], "x": "y" * 5000}}, 413, "request_too_large"),
        ({"json": chat(model="other")}, 404, "model_not_found"),
        ({"json": chat(logit_bias={"1000": 1})}, 400, "invalid_value"),
        ({"json": chat(stop_token_ids=[1000])}, 400, "invalid_value"),
    ],
)
async def test_a_refused_request_reaches_nobody(
    arguments: dict[str, Any], status: int, code: str
) -> None:
    async with running_router(max_body_bytes=4096) as ring:
        async with ring.session.post(CHAT, **arguments) as response:
            assert response.status == status
            assert _error(await response.read())["code"] == code
        assert ring.workers["tokenizer"].of(Tokenize) == []
        await ring.until(ring.is_empty)


async def test_a_chunked_body_over_the_limit_is_a_413() -> None:
    async def body() -> Any:
        for _ in range(10):
            yield b" " * 1000

    async with running_router(max_body_bytes=4096) as ring:
        headers = {"Content-Type": "application/json"}
        async with ring.session.post(CHAT, data=body(), headers=headers) as response:
            assert response.status == 413


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with running_router(body_timeout_s=0.01) as ring:
        whole = _request(chat())
        data = await _raw(ring, whole[:-5], until=b"request_timeout")
        assert data.startswith(b"HTTP/1.1 408")


async def test_wrong_paths_and_methods_answer_in_the_same_shape() -> None:
    async with running_router() as ring:
        async with ring.session.get("/v1/nothing") as response:
            assert response.status == 404
            assert _error(await response.read())["code"] == "not_found"
        async with ring.session.get(CHAT) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert _error(await response.read())["code"] == "method_not_allowed"


async def test_more_tokens_than_the_model_can_make_are_refused_by_the_name_given() -> None:
    async with running_router() as ring:
        for field in ("max_tokens", "max_completion_tokens"):
            async with ring.post(CHAT, chat(**{field: 512})) as response:
                assert response.status == 400
                assert _error(await response.read())["param"] == field
        async with ring.post(CHAT, chat(max_tokens=511)) as response:
            assert response.status == 200


async def test_a_stage_cannot_answer_with_a_status_that_is_no_error() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat())
        ring.refuse(ring.workers["tokenizer"].of(Tokenize)[-1], Failure(200, "odd", "odd"))
        assert (await task)[0] == 500


async def test_prompt_ids_outside_the_vocabulary_are_named() -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": [[1, 2], [3, 1000]]}
        async with ring.post(TEXT, body) as response:
            assert _error(await response.read())["param"] == "prompt[1][1]"


async def test_a_message_that_no_inbox_takes_is_a_413() -> None:
    async with running_router() as ring:
        ring.exchange.max_message_bytes = 2000
        long = [{"role": "user", "content": "x" * 3000}]
        async with ring.post(CHAT, chat(messages=long)) as response:
            assert response.status == 413
            assert _error(await response.read())["param"] == "messages"
        await ring.until(ring.is_empty)


async def test_keys_are_asked_for_everywhere_but_at_the_probes() -> None:
    async with running_router(api_keys=("secret",)) as ring:
        for path in (CHAT, "/tokenize"):
            async with ring.post(path, chat()) as response:
                assert response.status == 401
                assert _error(await response.read())["code"] == "invalid_api_key"
        async with ring.session.get("/v1/models") as response:
            assert response.status == 401
        for path in ("/live", "/ready", "/health"):
            async with ring.session.get(path) as response:
                assert response.status == 200
        headers = {"Authorization": "Bearer secret"}
        async with ring.post(CHAT, chat(), headers=headers) as response:
            assert response.status == 200


async def test_a_full_router_says_when_to_come_back() -> None:
    async with running_router(max_in_flight=1) as ring:
        task = await _waiting(ring, chat())
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        ring.text(_last(ring), 0, "a", end="stop")
        assert (await task)[0] == 200
        ring.script = Script()
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 200


async def test_a_client_over_its_share_gets_a_429() -> None:
    async with running_router(max_in_flight_per_client=1) as ring:
        task = await _waiting(ring, chat())
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
        ring.text(_last(ring), 0, "a", end="stop")
        await task


# Workers


async def test_without_workers_requests_wait_for_nobody() -> None:
    async with running_router(workers=False) as ring:
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        async with ring.session.get("/ready") as response:
            assert response.status == 503
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
            names = [getattr(message.itinerary, station).endpoint for message in messages]
            assert sorted(names) == sorted([f"mem://{station}", f"mem://{station}2"] * 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_compute_ends_its_requests_and_a_new_one_serves_again(stream: bool) -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=stream))
        counter = _last(ring)
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
            assert (status, _error(data)["code"]) == (503, "worker_lost")
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


async def test_a_restarted_worker_ends_the_requests_of_its_former_life_at_once() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat())
        ring.exchange.kill("compute")
        ring.worker("compute", "compute")
        ring.beat("compute")
        assert (await task)[0] == 503


async def test_a_worker_that_takes_no_mail_is_given_up_long_before_its_lease() -> None:
    async with running_router() as ring:
        ring.beat(stall_after_s=60.0)
        await ring.settle()
        task = await _waiting(ring, chat())
        ring.exchange.kill("compute")
        for _ in range(50):
            ring.beat("tokenizer", "detokenizer", stall_after_s=60.0)
            await ring.tick()
        assert (await task)[0] == 503


async def test_a_worker_in_a_long_step_keeps_its_requests() -> None:
    async with running_router() as ring:
        ring.beat(stall_after_s=60.0)
        await ring.settle()
        task = await _waiting(ring, chat())
        for _ in range(100):
            ring.beat("tokenizer", "detokenizer", stall_after_s=60.0)
            await ring.tick()
        ring.text(_last(ring), 0, "a", end="stop")
        assert (await task)[0] == 200


async def test_a_gap_in_the_rows_ends_the_request_and_aborts_it() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat())
        ring.text(_last(ring), 0, "a")
        ring.text(_last(ring), 2, "c")
        status, data = await task
        assert (status, _error(data)["code"]) == (503, "stream_lost")
        (abort,) = ring.workers["compute"].of(Abort)
        assert abort.reason == "lost"


async def test_an_attempt_at_no_stage_is_given_up_after_two_beats() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat())
        for _ in range(4):
            await ring.tick(0.5)
            ring.beat(open_counters=int64s([_last(ring)]))
            await ring.settle()
        assert not task.done()
        for _ in range(4):
            await ring.tick(0.5)
            ring.beat()
            await ring.settle()
        assert (await task)[0] == 503


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
        ring.beat("compute", address=ring.workers["tokenizer"].mail.address)
        await ring.settle()
        assert len(ring.workers["tokenizer"].of(RouterAlive)) == 1


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
        ("/tokenize", chat(chat_template_kwargs={"a": 1}), "chat_template_kwargs"),
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
            assert _error(await response.read())["param"] == param


async def test_a_question_to_a_dead_worker_fails() -> None:
    async with running_router() as ring:
        ring.script = None

        async def ask() -> int:
            async with ring.post("/tokenize", {"prompt": "a"}) as response:
                status: int = response.status
                return status

        task = asyncio.ensure_future(ask())
        await ring.until(lambda: len(ring.workers["tokenizer"].got) > 1)
        ring.actor.peer_lost(ring.workers["tokenizer"].mail.address)
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
            assert _error(await response.read())["code"] == "timeout"
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
        task = await _waiting(ring, chat(n=2))
        async with ring.session.get("/health") as response:
            body = await response.json()
        assert (body["status"], body["missing"]) == ("ok", [])
        assert body["workers"] == {"tokenizer": 1, "compute": 1, "detokenizer": 1}
        assert (body["requests"], body["attempts"], body["queries"]) == (1, 2, 0)
        assert [each["service"] for each in body["instances"]] == list(ring.workers)
        task.cancel()
        await ring.until(ring.is_empty)


async def test_a_draining_router_finishes_what_runs_and_refuses_the_rest() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=True))
        ring.text(_last(ring), 0, "a")
        await ring.settle()
        ring.actor.drain()
        assert not ring.actor.drained
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 503
            assert response.headers["Connection"] == "close"
            assert _error(await response.read())["code"] == "draining"
        async with ring.session.get("/ready") as response:
            assert (await response.json())["status"] == "draining"
        ring.text(_last(ring), 1, "b", end="stop")
        assert events((await task)[1])[-1]["choices"][0]["finish_reason"] == "stop"
        await ring.until(lambda: ring.actor.drained)


async def test_stopping_ends_open_streams_with_an_error_event() -> None:
    async with running_router() as ring:
        task = await _waiting(ring, chat(stream=True))
        ring.text(_last(ring), 0, "a")
        await ring.settle()
        await ring.actor.stop()
        assert events((await task)[1])[-1]["error"]["code"] == "draining"
        await ring.settle()
        assert ring.aborts("compute") == [_last(ring)]
        with pytest.raises(aiohttp.ClientConnectorError):
            async with ring.post(CHAT, chat()):
                pass
