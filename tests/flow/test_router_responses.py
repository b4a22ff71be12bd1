"""`/v1/responses` from HTTP to messages and back."""

from __future__ import annotations

import json
from typing import Any

from common.messages.failure import Failure
from common.messages.tokenize import ChatPrompt, ToolUse
from tests.flow.parsed_answers import MIXED, asked, fail, play
from tests.flow.router_ring import error_of, running_router
from tests.unit.router.answers import named_events

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


def response(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "input": "Hi", **more}


async def test_a_response_is_answered_in_one_piece() -> None:
    async with running_router() as ring:
        async with ring.post(PATH, response(metadata={"a": "b"})) as answer:
            body = await answer.json()
        assert answer.status == 200
        assert body["object"] == "response"
        assert body["id"].startswith("resp_")
        assert body["status"] == "completed"
        assert [item["type"] for item in body["output"]] == ["message"]
        assert body["output"][0]["content"][0]["text"] == "Hello"
        assert body["usage"]["total_tokens"] == 7
        assert body["metadata"] == {"a": "b"}
        assert ring.is_empty()


async def test_the_ring_gets_prompt_tools_and_rules() -> None:
    async with running_router() as ring:
        body = response(tools=[TOOL], tool_choice="required", instructions="Be kind.")
        task, message = await asked(ring, PATH, body)
        assert isinstance(message.prompt, ChatPrompt)
        assert [turn["role"] for turn in json.loads(message.prompt.messages_json)] == [
            "system",
            "user",
        ]
        assert message.rules.tools == ToolUse("required")
        assert message.stream.parse_tools
        assert message.stream.parse_reasoning
        play(ring, message, MIXED)
        status, data = await task
        assert status == 200
        kinds = [item["type"] for item in json.loads(data)["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        assert ring.is_empty()


async def test_a_stream_ends_with_what_the_whole_answer_says() -> None:
    async with running_router() as ring:
        task, message = await asked(ring, PATH, response(stream=True, tools=[TOOL]))
        play(ring, message, MIXED)
        status, data = await task
        assert status == 200
        first, *_, last = named_events(data)
        assert first["type"] == "response.created"
        assert last["type"] == "response.completed"
        items = last["response"]["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert items[1]["content"][0]["text"] == "It is sunny."
        assert items[2]["arguments"] == '{"city":"Oslo"}'
        assert ring.is_empty()


async def test_a_failure_in_mid_stream_is_a_failed_response() -> None:
    async with running_router() as ring:
        task, message = await asked(ring, PATH, response(stream=True))
        play(ring, message, MIXED[1:2], None)
        await ring.settle()
        fail(ring, message, 1, Failure(500, "internal_error", "it broke"))
        status, data = await task
        assert status == 200
        *_, failed, error = named_events(data)
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["message"] == "it broke"
        assert error["message"] == "it broke"
        assert ring.is_empty()


async def test_a_failure_before_the_first_text_has_its_status() -> None:
    async with running_router() as ring:
        task, message = await asked(ring, PATH, response(stream=True))
        ring.refuse(message, Failure(400, "context_length_exceeded", "too long", "input"))
        status, data = await task
        assert status == 400
        assert error_of(data)["param"] == "input"


async def test_what_is_wrong_is_a_400_in_openais_shape() -> None:
    async with running_router() as ring:
        async with ring.post(PATH, response(tools=[{"type": "fish"}])) as answer:
            data = await answer.read()
        assert answer.status == 400
        error = error_of(data)
        assert error["param"] == "tools[0].type"
        assert "fish" in error["message"]


async def test_a_tool_that_cannot_run_here_is_left_out_with_a_warning() -> None:
    async with running_router() as ring:
        async with ring.post(PATH, response(tools=[TOOL, {"type": "web_search"}])) as answer:
            assert answer.status == 200
            assert "web_search do not run here" in answer.headers["Warning"]
            assert [tool["name"] for tool in (await answer.json())["tools"]] == ["get_weather"]


async def test_only_what_is_there_is_allowed() -> None:
    async with running_router() as ring:
        for path in (PATH, f"{PATH}/input_tokens"):
            async with ring.session.get(path) as answer:
                assert answer.status == 405
                assert answer.headers["Allow"] == "POST"


async def test_a_request_id_in_the_body_is_the_answers() -> None:
    async with running_router() as ring:
        async with ring.post(PATH, response(request_id="mine")) as answer:
            assert answer.status == 200
            assert answer.headers["X-Request-Id"] == "mine"


async def test_the_input_is_counted_by_the_tokenizer() -> None:
    async with running_router() as ring:
        async with ring.post(f"{PATH}/input_tokens", response()) as answer:
            body = await answer.json()
        assert body == {"object": "response.input_tokens", "input_tokens": 3}
