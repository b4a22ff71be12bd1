"""`/v1/messages` from HTTP to messages and back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.messages.failure import Ending, Failure
from common.messages.tokenize import ChatPrompt, TokenizeQuery, ToolUse
from tests.flow.parsed_answers import MIXED, USAGE, asked, fail, play
from tests.flow.router_ring import running_router, waiting
from tests.unit.router.answers import named_events

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}


def message(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": "demo", "max_tokens": 50, "messages": messages, **more}


def error_of(data: bytes) -> dict[str, Any]:
    """Return the error of a body in Anthropic's shape."""
    body = json.loads(data)
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    return error


async def test_a_message_is_answered_in_one_piece() -> None:
    async with running_router() as ring:
        headers = {"anthropic-version": "2023-06-01"}
        async with ring.post(PATH, message(), headers=headers) as answer:
            body = await answer.json()
        assert answer.status == 200
        assert answer.headers["Request-Id"] == answer.headers["X-Request-Id"]
        assert body["type"] == "message"
        assert body["id"].startswith("msg_")
        assert body["content"] == [{"type": "text", "text": "Hello"}]
        assert body["stop_reason"] == "end_turn"
        assert body["usage"]["input_tokens"] == 5
        assert ring.is_empty()


async def test_the_ring_gets_prompt_tools_and_rules() -> None:
    async with running_router() as ring:
        body = message(
            system="Be kind.",
            tools=[TOOL],
            tool_choice={"type": "any"},
            thinking={"type": "enabled", "budget_tokens": 10},
        )
        task, sent = await asked(ring, PATH, body)
        assert isinstance(sent.prompt, ChatPrompt)
        assert [turn["role"] for turn in json.loads(sent.prompt.messages_json)] == [
            "system",
            "user",
        ]
        assert sent.rules.tools == ToolUse("required")
        assert sent.rules.thinking_budget == 10
        assert sent.sampling.max_tokens == 0
        assert sent.limits.max_output_length == 50
        play(ring, sent, MIXED)
        status, data = await task
        assert status == 200
        answer = json.loads(data)
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use"]
        assert answer["stop_reason"] == "tool_use"
        assert answer["usage"]["cache_read_input_tokens"] == 4
        assert ring.is_empty()


async def test_a_stream_begins_with_what_the_prompt_took() -> None:
    async with running_router() as ring:
        task, sent = await asked(ring, PATH, message(stream=True, tools=[TOOL]))
        play(ring, sent, MIXED)
        status, data = await task
        assert status == 200
        first, *_, delta, stop = named_events(data)
        assert first["message"]["usage"]["input_tokens"] == 8
        assert first["message"]["usage"]["cache_read_input_tokens"] == 4
        assert delta["delta"]["stop_reason"] == "tool_use"
        assert delta["usage"]["output_tokens"] == 7
        assert stop == {"type": "message_stop"}
        assert ring.is_empty()


async def test_a_stop_sequence_is_named() -> None:
    async with running_router() as ring:
        task, sent = await asked(ring, PATH, message(stop_sequences=["END"]))
        assert sent.stream.stop == ("END",)
        play(ring, sent, MIXED[1:3], Ending("stop", USAGE, stop="END"))
        _, data = await task
        body = json.loads(data)
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    async with running_router() as ring:
        task, sent = await asked(ring, PATH, message(stream=True))
        play(ring, sent, MIXED[1:2], None)
        await ring.settle()
        fail(ring, sent, 1, Failure(500, "nonfinite_logits", "it is gone"))
        status, data = await task
        assert status == 200
        error = named_events(data)[-1]
        assert error["error"] == {"type": "api_error", "message": "it is gone"}
        assert error["request_id"].startswith("req_")
        assert ring.is_empty()


async def test_a_client_that_leaves_in_mid_stream_leaves_nothing_behind() -> None:
    async with running_router() as ring:
        task, sent = await asked(ring, PATH, message(stream=True))
        play(ring, sent, MIXED[:1], None)
        await ring.settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ring.until(ring.is_empty)
        await ring.until(lambda: ring.aborts("compute") == [sent.attempt.counter])


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_what_is_wrong_is_named_in_anthropics_shape(path: str) -> None:
    async with running_router() as ring:
        wrong = message(messages=[{"role": "user", "content": [{"type": "image"}]}])
        async with ring.post(path, wrong) as answer:
            data = await answer.read()
        assert answer.status == 400
        assert error_of(data)["type"] == "invalid_request_error"
        assert error_of(data)["message"].startswith("messages[0].content[0].type: ")
        assert json.loads(data)["request_id"] == answer.headers["Request-Id"]


async def test_an_overflow_has_the_words_that_clients_compact_at() -> None:
    async with running_router() as ring:
        task, sent = await asked(ring, PATH, message())
        refusal = "this model's maximum context length is 512 tokens, but ..."
        code = "context_length_exceeded"
        ring.refuse(sent, Failure(400, code, refusal, "messages", False, 600, 511))
        status, data = await task
        assert status == 400
        assert error_of(data) == {
            "type": "invalid_request_error",
            "message": "prompt is too long: 600 tokens > 511 maximum",
        }


async def test_a_count_of_more_than_fits_says_so_in_the_same_words() -> None:
    async with running_router() as ring:
        ring.num_tokens = 511
        async with ring.post(f"{PATH}/count_tokens", message()) as answer:
            assert await answer.json() == {"input_tokens": 511}
        ring.num_tokens = 512
        async with ring.post(f"{PATH}/count_tokens", message()) as answer:
            data = await answer.read()
        assert answer.status == 400
        assert error_of(data)["message"] == "prompt is too long: 512 tokens > 511 maximum"


async def test_errors_of_every_layer_have_anthropics_shape() -> None:
    async with running_router(api_keys=("secret",), max_body_bytes=1024) as ring:
        key = {"x-api-key": "secret"}

        async def refused(path: str, body: Any, method: str = "post", **headers: str) -> Any:
            async with ring.session.request(method, path, json=body, headers=headers) as answer:
                return answer.status, error_of(await answer.read())["type"]

        assert await refused(PATH, message()) == (401, "authentication_error")
        unknown = message(model="other")
        assert await refused(PATH, unknown, **key) == (404, "not_found_error")
        large = message(system="x" * 2000)
        assert await refused(PATH, large, **key) == (413, "request_too_large")
        assert await refused(PATH, None, "get", **key) == (405, "invalid_request_error")
        assert await refused(f"{PATH}/batches", {}, **key) == (404, "not_found_error")
        version = {"anthropic-version": "2023-06-01", **key}
        assert await refused("/v1/models/other", None, "get", **version) == (
            404,
            "not_found_error",
        )
        async with ring.post(PATH, message(), headers=key) as answer:
            assert answer.status == 200
        bearer = {"Authorization": "Bearer secret"}
        async with ring.post(PATH, message(), headers=bearer) as answer:
            assert answer.status == 200


async def test_a_full_server_is_overloaded() -> None:
    async with running_router(max_in_flight=1) as ring:
        task = await waiting(ring, message(), PATH)
        async with ring.post(PATH, message()) as answer:
            data = await answer.read()
        assert answer.status == 529
        assert error_of(data)["type"] == "overloaded_error"
        assert int(answer.headers["Retry-After"]) >= 1
        task.cancel()


async def test_tokens_are_counted_by_the_tokenizer_as_they_would_be_put() -> None:
    async with running_router() as ring:
        body = message(tools=[TOOL], system="Be kind.")
        count = {key: value for key, value in body.items() if key != "max_tokens"}
        async with ring.post(f"{PATH}/count_tokens", count) as answer:
            assert await answer.json() == {"input_tokens": 3}
        (query,) = ring.workers["tokenizer"].of(TokenizeQuery)
        task, sent = await asked(ring, PATH, body)
        assert query.prompt == sent.prompt
        task.cancel()


async def test_models_are_described_as_anthropics_are() -> None:
    async with running_router() as ring:
        headers = {"anthropic-version": "2023-06-01"}
        async with ring.session.get("/v1/models/demo", headers=headers) as answer:
            card = await answer.json()
        assert (card["type"], card["id"], card["display_name"]) == ("model", "demo", "demo")
        assert card["created_at"].endswith("Z")
        async with ring.session.get("/v1/models", headers=headers) as answer:
            page = await answer.json()
        assert page == {"data": [card], "has_more": False, "first_id": "demo", "last_id": "demo"}
