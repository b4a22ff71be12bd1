"""Responses requests: what the ring is asked for, what is repeated, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.tokenize import Structure, ToolInput, ToolUse
from services.router.errors import ApiError
from services.router.generate_request import TRUNCATE_TO_FIT
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_input, parse_response
from services.router.responses.store import ResponseStore
from services.router.responses.tools import ToolName
from tests.unit.router.responses.parsed_requests import messages_of, parse, prompt_of

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
OTHER = {"type": "function", "name": "g", "parameters": None}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_flat_tools_become_functions_and_are_repeated_whole() -> None:
    parsed = parse(tools=[TOOL, OTHER], parallel_tool_calls=False)
    assert json.loads(prompt_of(parsed).tools_json) == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
        },
        {"type": "function", "function": {"name": "g"}},
    ]
    assert parsed.generate.rules.tools == ToolUse("auto", parallel=False)
    assert parsed.echo(parsed.generate)["tools"] == [
        {**TOOL, "description": None},
        {**OTHER, "description": None, "strict": None},
    ]


@pytest.mark.parametrize(
    ("choice", "use", "shown"),
    [
        ("auto", ToolUse("auto"), ["f", "g"]),
        ("none", None, []),
        ("required", ToolUse("required"), ["f", "g"]),
        ({"type": "function", "name": "g"}, ToolUse("named", "g"), ["f", "g"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "g"}],
            },
            ToolUse("required"),
            ["g"],
        ),
    ],
)
def test_a_choice_of_tools(choice: Any, use: ToolUse | None, shown: list[str]) -> None:
    parsed = parse(tools=[TOOL, OTHER], tool_choice=choice)
    tools = prompt_of(parsed).tools_json
    assert [tool["function"]["name"] for tool in json.loads(tools or b"[]")] == shown
    assert parsed.generate.rules.tools == use
    assert parsed.generate.stream.parse_tools is (use is not None)
    assert parsed.echo(parsed.generate)["tool_choice"] == choice


def test_a_schema_is_a_structure_and_is_repeated() -> None:
    layout = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    parsed = parse(text={"format": layout})
    structure = parsed.generate.rules.structure
    assert isinstance(structure, Structure)
    assert (structure.kind, structure.field) == ("json_schema", "text.format.schema")
    assert json.loads(structure.text) == SCHEMA
    assert parsed.echo(parsed.generate)["text"]["format"] == {**layout, "description": None}
    plain = parse(text={"format": {"type": "json_object"}})
    assert plain.generate.rules.structure == Structure("json_object", "", "text.format")
    assert parse(text={"format": {"type": "text"}}).generate.rules.structure is None


def test_logprobs_are_asked_for_by_either_field() -> None:
    assert parse().generate.sampling.num_logprobs == -1
    assert parse(include=["message.output_text.logprobs"]).generate.sampling.num_logprobs == 0
    assert parse(top_logprobs=3).generate.sampling.num_logprobs == 3


def test_effort_is_the_templates() -> None:
    assert prompt_of(parse()).template_kwargs_json == b""
    low = json.loads(prompt_of(parse(reasoning={"effort": "low"})).template_kwargs_json)
    assert low == {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    none = parse(reasoning={"effort": "none"})
    variables = json.loads(prompt_of(none).template_kwargs_json)
    assert variables == {"enable_thinking": False, "thinking": False}
    assert (parse().generate.rules.thinking_budget, none.generate.rules.thinking_budget) == (-1, 0)


def test_limits_truncation_and_the_extras_of_chat() -> None:
    parsed = parse(max_output_tokens=9, truncation="auto", top_k=4, seed=5, stop=["x"])
    assert parsed.generate.sampling.max_tokens == 9
    assert parsed.generate.truncate_to == TRUNCATE_TO_FIT
    assert (parsed.generate.sampling.top_k, parsed.generate.sampling.seed) == (4, 5)
    assert parsed.generate.stream.stop == ("x",)
    assert parse().generate.truncate_to == 0


def test_store_is_answered_with_the_truth() -> None:
    parsed = parse(store=True, previous_response_id=None, background=False)
    assert parsed.echo(parsed.generate)["store"] is False
    history = ResponseStore(1, 1 << 20, 60.0).of("")
    for store, expected in ((None, True), (True, True), (False, False)):
        body = {"model": "demo", "input": "Hi", "store": store}
        parsed = parse_response(body, Warnings(), history)
        assert parsed.echo(parsed.generate)["store"] is expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_needs_a_store_names_what_stands_against_it(
    fields: dict[str, Any], field: str
) -> None:
    body = {"model": "demo", "input": "Hi", **fields}
    with pytest.raises(ApiError, match=r"store|another router") as caught:
        parse_response(body, Warnings(), ResponseStore(1, 1 << 20, 60.0).of(""))
    assert caught.value.failure.field == field
    with pytest.raises(ApiError, match="responses_max is 0"):
        parse(**fields)


def test_namespaces_are_flattened_and_their_calls_read_back() -> None:
    namespaces = [
        {"type": "namespace", "name": "crm", "tools": [TOOL, PATCH]},
        {"type": "namespace", "name": "mcp__web__", "tools": [TOOL]},
        {"type": "namespace", "name": "functions", "tools": [OTHER]},
    ]
    parsed = parse(
        tools=namespaces,
        tool_choice={"type": "function", "name": "f", "namespace": "crm"},
        input=[
            {"role": "user", "content": "Hi"},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "namespace": "crm",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
    )
    tools = json.loads(prompt_of(parsed).tools_json)
    assert [tool["function"]["name"] for tool in tools] == [
        "crm__f",
        "crm__patch",
        "mcp__web__f",
        "g",
    ]
    assert parsed.input.tools.names["crm__patch"] == ToolName("patch", "crm", is_custom=True)
    assert parsed.generate.rules.tools == ToolUse("named", "crm__f")
    messages = json.loads(prompt_of(parsed).messages_json)
    assert messages[1]["tool_calls"][0]["function"]["name"] == "crm__f"
    assert parsed.echo(parsed.generate)["tools"] == namespaces


def test_items_add_tools_of_which_the_latest_counts() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    codex = {"type": "namespace", "name": "functions", "tools": [{**PATCH, "format": lark}, TOOL]}
    parsed = parse(
        tools=[OTHER, {**TOOL, "strict": False}],
        input=[
            {"type": "additional_tools", "role": "developer", "tools": [codex]},
            {"role": "user", "content": "Hi"},
        ],
    )
    functions = [tool["function"] for tool in json.loads(prompt_of(parsed).tools_json)]
    assert [function["name"] for function in functions] == ["g", "f", "patch"]
    assert functions[1]["strict"] is True
    assert parsed.input.tools.names["patch"] == ToolName("patch", "functions", is_custom=True)
    assert parsed.generate.rules.tools == ToolUse(
        "auto", inputs=(ToolInput("patch", "start: /a/"),)
    )
    assert len(json.loads(prompt_of(parsed).messages_json)) == 1


def test_tools_that_run_elsewhere_are_left_out_and_named() -> None:
    hosted = [
        {"type": "web_search", "external_web_access": True},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "image_generation"},
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "s"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    warnings = Warnings()
    body = {"model": "demo", "input": "Hi", "tools": [*hosted, TOOL]}
    parsed = parse_response(body, warnings)
    assert [tool["function"]["name"] for tool in json.loads(prompt_of(parsed).tools_json)] == ["f"]
    for at, kind in enumerate(("web_search", "web_search_preview", "image_generation")):
        assert f"tools[{at}]: tools of the type {kind} do not run here" in warnings.header()
    assert warnings.header().count("left out") == len(hosted)
    assert [tool["name"] for tool in parsed.echo(parsed.generate)["tools"]] == ["f"]
    assert prompt_of(parse(tools=hosted)).tools_json == b""


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    regex = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
    parsed = parse(
        tools=[
            {**PATCH, "format": {"type": "text"}},
            {**PATCH, "name": "lark", "format": lark},
            {**PATCH, "name": "regex", "format": regex},
        ],
        tool_choice={"type": "custom", "name": "lark"},
    )
    functions = [tool["function"] for tool in json.loads(prompt_of(parsed).tools_json)]
    assert functions[0] == {
        "name": "patch",
        "description": "Change files.",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    assert 'start: "a"' in functions[1]["parameters"]["properties"]["input"]["description"]
    assert functions[2]["parameters"]["properties"]["input"]["pattern"] == "^(?:[ab]+)$"
    inputs = (ToolInput("lark", 'start: "a"'),)
    assert parsed.generate.rules.tools == ToolUse("named", "lark", inputs=inputs)


def test_a_model_with_tools_is_told_of_the_structure() -> None:
    layout = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    messages = messages_of("Hi", tools=[TOOL], text={"format": layout}, instructions="Be kind.")
    assert messages[0]["content"].startswith("Be kind.\n\n")
    assert json.dumps(SCHEMA, separators=(",", ":")) in messages[0]["content"]
    json_messages = messages_of("Hi", tools=[TOOL], text={"format": {"type": "json_object"}})
    assert json_messages[0]["role"] == "system" and "JSON" in json_messages[0]["content"]
    for more in ({}, {"tools": [TOOL], "tool_choice": "required"}):
        assert messages_of("Hi", text={"format": layout}, **more)[0]["role"] == "user"


def test_a_count_is_of_the_prompt_that_would_be_put() -> None:
    body = {"model": "demo", "input": "Hi", "tools": [TOOL], "instructions": "Be kind."}
    assert parse_input(body, Warnings()) == ("demo", prompt_of(parse(**body)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": 5}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "fish_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].id"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": []}]}]},
            "input[0].output[0].type",
        ),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content[0]"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": -3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "left"}, "truncation"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": 1}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "fish"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**PATCH, "format": {"type": "fish"}}]}, "tools[0].format.type"),
        ({"tools": [{**PATCH, "format": "grammar"}]}, "tools[0].format"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.definition"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "definition": "a", "syntax": "b"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "input": [
                    {"role": "user", "content": ""},
                    {"type": "additional_tools", "tools": [5]},
                ]
            },
            "input[1].tools[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.failure.status == 400
    assert caught.value.failure.field is not None
    assert caught.value.failure.field.startswith(field)
    assert caught.value.failure.message.startswith(f"{field}")
