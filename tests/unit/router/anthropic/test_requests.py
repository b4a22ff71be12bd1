"""Messages requests: what the ring is asked for, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.tokenize import ChatPrompt, Structure, ToolUse
from services.router.anthropic.requests import MessageRequest, parse_message, parse_prompt
from services.router.errors import ApiError
from services.router.request_warnings import Warnings

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def message(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": "demo", "max_tokens": 32, "messages": messages, **more}


def parse(**more: Any) -> MessageRequest:
    return parse_message(message(**more), Warnings())


def prompt_of(parsed: MessageRequest) -> ChatPrompt:
    (prompt,) = parsed.generate.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_max_tokens_bounds_what_fits_and_is_no_reason_to_refuse() -> None:
    parsed = parse(max_tokens=64000)
    assert parsed.generate.sampling.max_tokens == 0
    assert parsed.generate.usual_max_tokens == parsed.max_tokens == 64000


def test_what_is_left_out_is_the_models_own() -> None:
    assert "temperature" in parse().generate.unset
    parsed = parse(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a", "b", "a"], seed=3)
    sampling = parsed.generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.seed, parsed.generate.has_seed) == (3, True)
    assert parsed.generate.stream.stop == ("a", "b")
    assert not parsed.generate.unset & {"temperature", "top_p", "top_k"}


def test_silence_about_thinking_is_no() -> None:
    for thinking in (None, {"type": "disabled"}):
        parsed = parse(thinking=thinking)
        variables = json.loads(prompt_of(parsed).template_kwargs_json)
        assert variables == {"enable_thinking": False, "thinking": False}
        assert not parsed.shows_thinking
        assert parsed.generate.stream.parse_reasoning


def test_thinking_has_its_budget() -> None:
    parsed = parse(thinking={"type": "enabled", "budget_tokens": 16})
    assert parsed.generate.rules.thinking_budget == 16
    assert parsed.shows_thinking
    assert json.loads(prompt_of(parsed).template_kwargs_json)["enable_thinking"] is True
    adaptive = parse(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert adaptive.generate.rules.thinking_budget == -1
    assert json.loads(prompt_of(adaptive).template_kwargs_json)["reasoning_effort"] == "low"
    assert not parse(thinking={"type": "adaptive", "display": "omitted"}).shows_thinking


def test_tools_become_functions() -> None:
    parsed = parse(tools=[TOOL])
    assert json.loads(prompt_of(parsed).tools_json) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
        }
    ]
    assert parsed.generate.rules.tools == ToolUse("auto")
    assert parsed.generate.stream.parse_tools


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        ({"type": "auto"}, ToolUse("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse("auto", parallel=False)),
        ({"type": "any"}, ToolUse("required")),
        ({"type": "tool", "name": "f"}, ToolUse("named", "f")),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_of_tools(choice: dict[str, Any], use: ToolUse | None) -> None:
    parsed = parse(tools=[TOOL], tool_choice=choice)
    assert parsed.generate.rules.tools == use
    assert parsed.generate.stream.parse_tools is (use is not None)
    assert bool(prompt_of(parsed).tools_json) is (use is not None)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.",
        ),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_"),
    ],
)
def test_a_schema_is_a_structure(fields: dict[str, Any], where: str) -> None:
    structure = parse(**fields).generate.rules.structure
    assert isinstance(structure, Structure)
    assert structure.kind == "json_schema"
    assert json.loads(structure.text) == SCHEMA
    assert structure.field == f"{where}format.schema"


def test_words_of_the_assistant_are_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    prompt = prompt_of(parse(messages=messages))
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt


def test_a_count_is_of_the_prompt_that_would_be_put() -> None:
    body = message(tools=[TOOL], system="Be kind.", thinking={"type": "adaptive"})
    parsed = parse_message(body, Warnings())
    del body["max_tokens"]
    assert parse_prompt(body, Warnings()) == ("demo", prompt_of(parsed))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 129}, "stop_sequences"),
        ({"stop_sequences": ["x" * 999] * 17}, "stop_sequences"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": 5, "name": "f"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    body = {key: value for key, value in message(**fields).items() if value is not None}
    with pytest.raises(ApiError) as caught:
        parse_message(body, Warnings())
    assert caught.value.failure.status == 400
    assert caught.value.failure.field == field
    assert caught.value.failure.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("container", "c"),
        ("mcp_servers", [{"type": "url", "url": "https://a.b", "name": "m"}]),
    ],
)
def test_hints_are_taken_with_a_warning(field: str, value: Any) -> None:
    body = message(**{field: value})
    warnings, counting = Warnings(), Warnings()
    assert parse_message(body, warnings).generate == parse().generate
    parse_prompt(body, counting)
    for header_warnings in (warnings, counting):
        assert header_warnings.header() == f'299 - "{field}: has no effect here"'


SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
]


@pytest.mark.parametrize("tool", SERVER_TOOLS)
def test_tools_that_cannot_run_here_are_left_out_with_a_warning(tool: dict[str, Any]) -> None:
    warnings, counting = Warnings(), Warnings()
    parsed = parse_message(message(tools=[tool, TOOL]), warnings)
    assert parsed.generate == parse(tools=[TOOL]).generate
    assert "tools[0]: tools of the type" in warnings.header()
    assert parse(tools=[tool]).generate == parse().generate
    assert parse_prompt(message(tools=[tool]), counting) == parse_prompt(message(), Warnings())
    assert counting.header() == warnings.header()


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}])
def test_the_choice_of_a_tool_that_is_left_out_is_left_out_too(choice: dict[str, Any]) -> None:
    assert parse(tools=[SERVER_TOOLS[0]], tool_choice=choice).generate == parse().generate


def test_a_call_can_still_be_required_of_the_other_tools() -> None:
    parsed = parse(tools=[SERVER_TOOLS[0], TOOL], tool_choice={"type": "any"})
    assert parsed.generate.rules.tools == ToolUse("required")


def test_no_tools_and_no_say_about_them_are_alike() -> None:
    assert parse(tools=[], tool_choice={"type": "auto"}).generate == parse().generate


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_a_stop_sequence_may_cut_what_has_to_have_a_form(fields: dict[str, Any]) -> None:
    assert parse(**fields, stop_sequences=["x"]).generate.stream.stop == ("x",)
