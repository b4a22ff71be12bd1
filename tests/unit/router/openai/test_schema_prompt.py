"""Every API hands the model of an agent's loop the same conversation, tools and rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.tokenize import ChatPrompt, ToolUse
from services.router.anthropic.requests import parse_message, parse_prompt
from services.router.generate_request import GenerateRequest
from services.router.openai.chat import parse_chat
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_input, parse_response

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WORDS = json.dumps(SCHEMA, separators=(",", ":"))
FUNCTION = {"name": "get_weather", "description": "Get it.", "parameters": SCHEMA}
GIVEN, RESULT = '{"city":"Oslo"}', '{"temperature_c":3}'


def chat_body(**more: Any) -> dict[str, Any]:
    call = {"name": "get_weather", "arguments": GIVEN}
    return {
        "model": "demo",
        "messages": [
            {"role": "user", "content": "How is it in Oslo?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        **more,
    }


def responses_body() -> dict[str, Any]:
    return {
        "model": "demo",
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "How is it in Oslo?"}],
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": GIVEN,
            },
            {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {
            "format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
        },
    }


def messages_body() -> dict[str, Any]:
    use = {
        "type": "tool_use",
        "id": "call_1",
        "name": "get_weather",
        "input": json.loads(GIVEN),
    }
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}
    return {
        "model": "demo",
        "max_tokens": 100,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How is it in Oslo?"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "get_weather", "description": "Get it.", "input_schema": SCHEMA}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }


def read(request: GenerateRequest) -> tuple[list[Any], Any, Any]:
    """Return the messages without what stands for nothing in them, the tools, the rules."""
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    messages = json.loads(prompt.messages_json)
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    structure = request.rules.structure
    assert structure is not None
    rules = (structure.kind, structure.text, request.rules.tools)
    return messages, json.loads(prompt.tools_json), rules


def test_the_second_step_of_a_loop_is_the_same_in_every_api() -> None:
    chat = read(parse_chat(chat_body(), Warnings()).generate)
    assert read(parse_response(responses_body(), Warnings()).generate) == chat
    assert read(parse_message(messages_body(), Warnings()).generate) == chat
    messages, _, rules = chat
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert WORDS in messages[0]["content"]
    assert rules == ("json_schema", WORDS, ToolUse("auto"))


def test_tokens_are_counted_of_the_prompt_with_the_schema() -> None:
    (prompt,) = parse_response(responses_body(), Warnings()).generate.prompts
    assert parse_input(responses_body(), Warnings()) == ("demo", prompt)
    (prompt,) = parse_message(messages_body(), Warnings()).generate.prompts
    assert parse_prompt(messages_body(), Warnings()) == ("demo", prompt)


@pytest.mark.parametrize(
    ("system", "after"),
    [
        ("Be kind.", "Be kind.\n\n"),
        ("", ""),
        ([{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}], None),
    ],
)
def test_a_system_message_that_is_there_has_it_at_its_end(system: Any, after: str | None) -> None:
    body = chat_body()
    body["messages"].insert(0, {"role": "system", "content": system})
    first, second, *_ = read(parse_chat(body, Warnings()).generate)[0]
    assert second["role"] == "user"
    if after is None:
        assert [part["text"] for part in first["content"][:2]] == ["Be", "kind."]
        assert WORDS in first["content"][2]["text"]
    else:
        assert first["content"].startswith(after) and WORDS in first["content"]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": None},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
    ],
)
def test_where_the_grammar_leaves_no_such_choice_nothing_is_added(more: dict[str, Any]) -> None:
    messages, *_ = (
        json.loads(prompt.messages_json)
        for prompt in parse_chat(chat_body(**more), Warnings()).generate.prompts
        if isinstance(prompt, ChatPrompt)
    )
    assert messages[0]["role"] == "user"
