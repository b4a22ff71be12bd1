"""Answers that must have a form: what may cut them, what may not, and what no form can hold."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from benchmarks.stack import Stack
from tests.system.conftest import client_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
TOOL = {"name": "get_weather", "parameters": {**WEATHER, "required": ["city"]}}
QUESTION = "Anna is 29 years old."
MESSAGES = [{"role": "user", "content": QUESTION}]
COMMON: dict[str, Any] = {"model": "demo", "temperature": 0}
HELD_BACK: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 90}]


def post(stack: Stack, path: str, **fields: Any) -> dict[str, Any]:
    with client_of(stack) as client:
        answer: Any = client.post(path, body={**COMMON, **fields}, cast_to=object)
    return dict(answer)


def chat(stack: Stack, **fields: Any) -> tuple[str, str]:
    """Ask for a person in JSON; what it says and why it ended."""
    form = {"type": "json_schema", "json_schema": NAMED}
    fields = {"messages": MESSAGES, "response_format": form, "max_tokens": 100, **fields}
    (choice,) = post(stack, "/chat/completions", **fields)["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def completion(stack: Stack, **fields: Any) -> tuple[str, str]:
    fields = {"prompt": QUESTION, "structured_outputs": {"json": SCHEMA}, **fields}
    (choice,) = post(stack, "/completions", max_tokens=100, **fields)["choices"]
    return choice["text"], choice["finish_reason"]


def response(stack: Stack, **fields: Any) -> tuple[str, str]:
    form = {"format": {"type": "json_schema", **NAMED}}
    answer = post(stack, "/responses", input=QUESTION, text=form, max_output_tokens=100, **fields)
    (part,) = answer["output"][0]["content"]
    return part["text"], answer["status"]


def message(stack: Stack, stop: list[str]) -> tuple[str, str]:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {"messages": MESSAGES, "output_format": form, "stop_sequences": stop}
    answer = post(stack, "/messages", max_tokens=100, **fields)
    return answer["content"][0]["text"], answer["stop_reason"]


def test_a_stop_string_cuts_a_structure_in_every_api(demo_stack: Stack) -> None:
    for said, reason in (
        chat(demo_stack, stop=['"age"']),
        completion(demo_stack, stop=['"age"']),
        response(demo_stack, stop=['"age"']),
        message(demo_stack, ['"age"']),
    ):
        assert said.startswith('{"name"') and said.rstrip().endswith(","), said
        assert reason in ("stop", "completed", "stop_sequence")


def test_a_stop_token_cuts_a_structure(demo_stack: Stack) -> None:
    whole = chat(demo_stack, return_token_ids=True)[0]
    form = {"type": "json_schema", "json_schema": NAMED}
    fields = {"messages": MESSAGES, "response_format": form, "max_tokens": 100}
    (choice,) = post(demo_stack, "/chat/completions", **fields, return_token_ids=True)["choices"]
    fourth = choice["token_ids"][3]
    said, reason = chat(demo_stack, stop_token_ids=[fourth])
    assert (whole.startswith(said), len(said) < len(whole), reason) == (True, True, "stop")


@pytest.mark.parametrize("held_back", HELD_BACK)
@pytest.mark.parametrize("ask", [chat, completion, response])
def test_a_structure_that_is_complete_ends_whatever_holds_the_end_back(
    ask: Any, held_back: dict[str, Any], demo_stack: Stack
) -> None:
    said, reason = ask(demo_stack, **held_back)
    jsonschema.validate(json.loads(said), SCHEMA)
    assert reason in ("stop", "completed")


@pytest.mark.parametrize("held_back", HELD_BACK)
def test_a_call_that_is_forced_ends_too(held_back: dict[str, Any], demo_stack: Stack) -> None:
    fields = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 100,
    }
    (choice,) = post(demo_stack, "/chat/completions", **fields, **held_back)["choices"]
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)


def test_a_word_that_is_banned_is_in_no_structure(demo_stack: Stack) -> None:
    name = json.loads(chat(demo_stack)[0])["name"]
    assert name
    said, reason = chat(demo_stack, bad_words=[name])
    assert reason == "stop"
    assert json.loads(said)["name"] != name


def test_a_stop_string_cuts_the_arguments_of_a_call_that_is_forced(demo_stack: Stack) -> None:
    fields = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "stop": ["Paris"],
        "max_tokens": 100,
    }
    (choice,) = post(demo_stack, "/chat/completions", **fields)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "Paris" not in call["function"]["arguments"]


def test_a_schema_is_held_as_far_as_a_grammar_can_and_the_rest_is_said(demo_stack: Stack) -> None:
    loose = {**SCHEMA, "not": {"required": ["nothing"]}, "dependentRequired": {"name": ["age"]}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": loose}}
    with client_of(demo_stack) as client:
        messages: Any = MESSAGES
        answer = client.chat.completions.with_raw_response.create(
            **COMMON, messages=messages, extra_body={"response_format": form}, max_tokens=100
        )
    field = "response_format.json_schema.schema"
    left = "is left to the model: no grammar holds it"
    warnings = [f'299 - "{field}.{name}: {left}"' for name in ("not", "dependentRequired")]
    assert answer.headers["warning"] == ", ".join(warnings)
    said = answer.parse().choices[0].message.content or ""
    jsonschema.validate(json.loads(said), loose)
