"""The router from HTTP to messages and back: answers, streams, and the connections they go over."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
import structlog

from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.generate import Generate
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.tokenize import TextPrompt, Tokenize
from tests.flow.router_ring import (
    CARD,
    CHAT,
    TEXT,
    Ring,
    Script,
    chat,
    error_of,
    events,
    last_counter,
    running_router,
    waiting,
)

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
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "refusal": None,
                    "reasoning": None,
                    "reasoning_content": None,
                },
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
        ring.text(last_counter(ring), 0, "one")
        response = await asking
        assert b'"content":"one"' in await response.content.readany()
        ring.text(last_counter(ring), 1, "two")
        assert b'"content":"two"' in await response.content.readany()
        ring.text(last_counter(ring), 2, "", num_tokens=0, end="length")
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_no_header_leaves_before_the_first_mail() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=True))
        refusal = Failure(400, "context_length_exceeded", "messages: too long", "messages")
        ring.refuse(ring.workers["tokenizer"].of(Tokenize)[-1], refusal)
        status, data = await task
        assert status == 400
        assert error_of(data)["param"] == "messages"
        assert error_of(data)["code"] == "context_length_exceeded"
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
        body = {"model": "demo", "prompt": ["a", [1, 2]], "n": 2, "max_tokens": 2}
        async with ring.post(TEXT, body) as response:
            choices = (await response.json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        (first,) = ring.workers["tokenizer"].of(Tokenize)
        (second,) = ring.workers["compute"].of(Generate)
        assert (first.prompt, first.prompt_field) == (TextPrompt("a"), "prompt[0]")
        assert second.prompt_ids == int32s([1, 2]).tobytes()
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


async def test_the_models_own_sampling_settings_stand_for_what_a_client_left_out() -> None:
    async with running_router(workers=False) as ring:
        ring.worker("tokenizer", "tokenizer")
        ring.worker("detokenizer", "detokenizer")
        own = (("temperature", 0.6), ("top_k", 20.0))
        ring.worker("compute", "compute", dataclasses.replace(CARD, sampling_defaults=own))
        ring.beat()
        await ring.settle()
        for body in (chat(), chat(temperature=1.0, top_k=None)):
            async with ring.post(CHAT, body) as response:
                assert response.status == 200
        first, second = ring.workers["tokenizer"].of(Tokenize)
        assert (first.sampling.temperature, first.sampling.top_k) == (0.6, 20)
        assert (second.sampling.temperature, second.sampling.top_k) == (1.0, 20)
        async with ring.session.get("/v1/models") as response:
            (card,) = (await response.json())["data"]
        assert card["sampling_defaults"] == {
            "temperature": 0.6,
            "top_p": 1.0,
            "top_k": 20,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }


async def test_the_route_and_the_limits_are_stamped_on_the_request() -> None:
    async with running_router() as ring:
        async with ring.post(CHAT, chat()) as response:
            assert response.status == 200
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        way = message.route
        assert way.tokenizer == ring.workers["tokenizer"].transport.address
        assert way.compute == ring.workers["compute"].transport.address
        assert way.detokenizer == ring.workers["detokenizer"].transport.address
        assert way.reply == ring.transport.address
        assert message.limits.max_model_len == 512


@pytest.mark.parametrize(
    ("body", "longest", "expected"),
    [
        ({}, 511, (0, 16)),
        ({}, 10, (0, 10)),
        ({}, 0, (0, 16)),
        ({"min_tokens": 40}, 511, (0, 40)),
        ({"min_tokens": 40}, 10, (0, 10)),
        ({"max_tokens": 9}, 10, (9, 10)),
    ],
)
async def test_a_completion_without_max_tokens_asks_for_sixteen_or_what_fits(
    body: dict[str, Any], longest: int, expected: tuple[int, int]
) -> None:
    async with running_router(workers=False) as ring:
        ring.worker("tokenizer", "tokenizer")
        ring.worker("detokenizer", "detokenizer")
        ring.worker("compute", "compute", dataclasses.replace(CARD, max_output_length=longest))
        ring.beat()
        await ring.settle()
        async with ring.post(TEXT, {"model": "demo", "prompt": "a", **body}) as response:
            assert response.status == 200
        (message,) = ring.workers["tokenizer"].of(Tokenize)
        assert (message.sampling.max_tokens, message.limits.max_output_length) == expected


async def test_completion_logprobs_have_the_old_shape() -> None:
    def token(index: int) -> TokenLogprob:
        text = "Hello"[index * 3 :][:3]
        chosen = Candidate(index, text, text.encode(), -0.5)
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


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_no_tokens_is_the_prompt_and_its_usage(stream: bool) -> None:
    async with running_router() as ring:
        body = {"model": "demo", "prompt": ["Say: ", [1, 2]], "echo": True, "max_tokens": 0, "n": 2}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with ring.post(TEXT, body) as response:
            data = await response.read()
        assert response.status == 200
        chunks = events(data) if stream else [json.loads(data)]
        texts = dict.fromkeys(range(4), "")
        reasons = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert texts == {0: "Say: ", 1: "Say: ", 2: "text of ids", 3: "text of ids"}
        assert reasons == ["length"] * 4
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 2, 0)
        kind = "text/event-stream" if stream else "application/json"
        assert response.content_type == kind
        assert ring.workers["tokenizer"].of(Tokenize) == []
        await ring.until(ring.is_empty)


async def test_a_failure_in_mid_stream_is_an_error_event_before_done() -> None:
    async with running_router() as ring:
        task = await waiting(ring, chat(stream=True, n=2))
        first = last_counter(ring)
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
        task = await waiting(ring, chat())
        ring.text(last_counter(ring), 0, "a")
        ring.text(last_counter(ring), 1, "", end=Failure(500, "nan", "not finite"))
        status, data = await task
        assert (status, error_of(data)["code"]) == (500, "nan")


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
        f"POST {CHAT} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def test_the_connection_of_a_stream_serves_the_next_request() -> None:
    async with running_router() as ring:
        reader, writer = await asyncio.open_connection("127.0.0.1", ring.actor.port)
        for _ in range(3):
            writer.write(_request(chat(stream=True)))
            data = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert data.startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_pipelined_streams_come_one_after_the_other() -> None:
    async with running_router() as ring:
        check = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stream = _request(chat(stream=True))
        data = await _raw(ring, stream, stream, check, until=b'{"status":"ok"}')
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.count(b"data: [DONE]\n\n\r\n0\r\n\r\n") == 2


async def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_the_connection() -> None:
    async with running_router() as ring:
        data = await _raw(ring, _request(chat(stream=True), "1.0"), until=b"never")
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert events(body)[0]["object"] == "chat.completion.chunk"


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with running_router(body_timeout_s=0.01) as ring:
        whole = _request(chat())
        data = await _raw(ring, whole[:-5], until=b"request_timeout")
        assert data.startswith(b"HTTP/1.1 408")


async def test_a_request_id_is_echoed_or_made() -> None:
    async with running_router() as ring:
        headers = {"X-Request-Id": "mine-1"}
        for body in (chat(), chat(stream=True), {"bad": 1}):
            async with ring.post(CHAT, body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine-1"
        async with ring.session.get("/live") as response:
            assert response.headers["X-Request-Id"].startswith("req_")


async def test_the_line_of_a_request_names_it_and_the_trace_that_it_is_in() -> None:
    headers = {
        "X-Request-Id": "mine",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    async with running_router() as ring:
        with structlog.testing.capture_logs() as lines:
            async with ring.post(CHAT, chat(), headers=headers):
                pass
            await ring.until(lambda: any(line["event"] == "request ended" for line in lines))
    (line,) = [line for line in lines if line["event"] == "request ended"]
    assert line["request_id"] == "mine"
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
