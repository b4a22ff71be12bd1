"""Structures, tools and other rules: what requests for them become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.tokenize import ChatPrompt, OutputRules, Structure, ToolUse
from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_warnings import Warnings
from tests.unit.router.openai.parsed_requests import USER, chat_of, prompt_of

TOOL = {"type": "function", "function": {"name": "f"}}


# Rules


def test_structures_under_all_their_names() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    packed = '{"type":"object","properties":{"a":{"type":"integer"}}}'
    named = {"name": "answer", "schema": schema, "strict": True}
    expected: list[tuple[dict[str, Any], Structure]] = [
        (
            {"response_format": {"type": "json_object"}},
            Structure("json_object", "", "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": named}},
            Structure("json_schema", packed, "response_format.json_schema.schema", strict=True),
        ),
        (
            {"structured_outputs": {"json": schema}},
            Structure("json_schema", packed, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": json.dumps(schema), "disable_fallback": True}},
            Structure("json_schema", packed, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            Structure("json_object", "", "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            Structure("regex", "a+", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"choice": ["b", "a", "b"]}},
            Structure("choice", '["b","a"]', "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            Structure("grammar", "start: /a/", "structured_outputs.grammar"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": schema}},
            Structure("json_schema", packed, "response_format.schema"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Structure("json_object", "", "structured_outputs.json_object", compact=True),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Structure("structural_tag", '{"type":"any_text"}', "response_format.format"),
        ),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "any_text"}}'}},
            Structure(
                "structural_tag", '{"type":"any_text"}', "structured_outputs.structural_tag.format"
            ),
        ),
        ({"regex": "a+"}, Structure("regex", "a+", "regex")),
        ({"ebnf": 'root ::= "a"'}, Structure("grammar", 'root ::= "a"', "ebnf")),
        (
            {"json_schema": json.dumps(schema)},
            Structure("json_schema", packed, "json_schema"),
        ),
    ]
    for fields, structure in expected:
        assert chat_of(**fields).generate.rules.structure == structure
        body = {"model": "demo", "prompt": "a", **fields}
        assert parse_completion(body, Warnings()).generate.rules.structure == structure
    assert chat_of(response_format={"type": "text"}).generate.rules.structure is None


def test_a_structural_tag_in_its_older_form_becomes_one_of_today() -> None:
    schema = {"type": "object"}
    structures = [{"begin": "<f=a>", "schema": schema, "end": "</f>"}]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    structure = chat_of(response_format=older).generate.rules.structure
    assert structure is not None and structure.field == "response_format.structures"
    tag = {
        "begin": "<f=a>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</f>",
    }
    layout = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
    assert json.loads(structure.text) == layout
    structure = chat_of(
        structured_outputs={"structural_tag": json.dumps(older)}
    ).generate.rules.structure
    assert structure is not None and json.loads(structure.text) == layout
    structure = chat_of(response_format={**older, "at_least_one": True}).generate.rules.structure
    assert structure is not None and json.loads(structure.text)["at_least_one"] is True


@pytest.mark.parametrize(
    ("choice", "use", "names"),
    [
        (None, ToolUse("auto"), ["f", "g"]),
        ("auto", ToolUse("auto"), ["f", "g"]),
        ("required", ToolUse("required"), ["f", "g"]),
        ("none", None, []),
        ({"type": "function", "function": {"name": "g"}}, ToolUse("named", "g"), ["f", "g"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
            ToolUse("required"),
            ["g"],
        ),
    ],
)
def test_tools_and_what_is_chosen_of_them(choice: Any, use: ToolUse | None, names: Any) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": "g", "strict": True}}]
    request = chat_of(tools=tools, tool_choice=choice).generate
    assert request.rules.tools == use
    assert request.stream.parse_tools is (use is not None)
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    packed = json.loads(prompt.tools_json or b"[]")
    assert [tool["function"]["name"] for tool in packed] == names


def test_calls_may_be_kept_to_one_at_a_time() -> None:
    request = chat_of(tools=[TOOL], parallel_tool_calls=False).generate
    assert request.rules.tools == ToolUse("auto", parallel=False)


def test_a_structure_may_stand_beside_tools_that_need_not_be_called() -> None:
    rules = chat_of(tools=[TOOL], response_format={"type": "json_object"}).generate.rules
    assert rules.structure is not None
    assert rules.tools == ToolUse("auto")


def test_other_rules_arrive() -> None:
    request = chat_of(
        allowed_token_ids=[5, 3, 5],
        bad_words=["no", "never"],
        thinking_token_budget=100,
        truncate_prompt_tokens=7,
        truncation_side="right",
        prompt_logprobs=4,
        return_token_ids=True,
        spaces_between_special_tokens=True,
    ).generate
    assert request.rules == OutputRules(None, None, 100, (5, 3), ("no", "never"))
    assert (request.truncate_to, request.truncate_side) == (7, "right")
    assert request.sampling.num_prompt_logprobs == 4
    assert request.stream.return_prompt_ids


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_stops_and_words_stand_beside_what_has_to_have_a_form(form: dict[str, Any]) -> None:
    request = chat_of(
        **form,
        stop=["x"],
        stop_token_ids=[5],
        min_tokens=2,
        ignore_eos=True,
        bad_words=["no"],
        allowed_token_ids=[7],
    ).generate
    sampling = request.sampling
    assert request.stream.stop == ("x",)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((5,), 2, True)
    assert (request.rules.bad_words, request.rules.allowed_token_ids) == (("no",), (7,))


TAGGED = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
LEFT = '299 - "{}.properties.tags.uniqueItems: is left to the model: no grammar holds it"'


def _named(**more: Any) -> dict[str, Any]:
    named = {"name": "a", "schema": TAGGED, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _tagger(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": TAGGED, **more}}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (_named(), "response_format.json_schema.schema"),
        (_named(strict=False), "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": TAGGED}}, "structured_outputs.json"),
        ({"json_schema": json.dumps(TAGGED)}, "json_schema"),
        ({"tools": [_tagger()], "tool_choice": "required"}, "tools.f.parameters"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "json_schema", "json_schema": TAGGED},
                }
            },
            "response_format.format.json_schema",
        ),
    ],
)
def test_what_no_grammar_holds_is_left_to_the_model_with_a_warning(
    fields: dict[str, Any], where: str
) -> None:
    warnings = Warnings()
    parse_chat({"model": "demo", "messages": [USER], **fields}, warnings)
    assert warnings.header() == LEFT.format(where)


@pytest.mark.parametrize(
    "fields", [{"tools": [_tagger()]}, {**_named(), "tools": [TOOL], "tool_choice": "required"}]
)
def test_what_no_grammar_is_made_of_needs_no_warning(fields: dict[str, Any]) -> None:
    warnings = Warnings()
    parse_chat({"model": "demo", "messages": [USER], **fields}, warnings)
    assert warnings.header() == ""


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        (_named(strict=True), "response_format.json_schema.schema.properties.tags.uniqueItems"),
        ({"tools": [_tagger(strict=True)]}, "tools.f.parameters.properties.tags.uniqueItems"),
    ],
)
def test_strict_says_which_keyword_cannot_be_held(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ApiError, match="no grammar holds it") as caught:
        chat_of(**fields)
    assert caught.value.failure.field == where


# Template variables


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
        ({"documents": []}, None),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            {"reasoning_effort": "high", "thinking": False},
        ),
    ],
)
def test_what_the_template_is_told(fields: dict[str, Any], expected: Any) -> None:
    packed = prompt_of(**fields).template_kwargs_json
    assert (json.loads(packed) if packed else None) == expected


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, -1),
        ({"reasoning_effort": "low"}, -1),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "none", "thinking_token_budget": 9}, 9),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, -1),
    ],
)
def test_an_effort_of_none_leaves_no_token_for_reasoning(
    fields: dict[str, Any], budget: int
) -> None:
    assert chat_of(**fields).generate.rules.thinking_budget == budget


# Messages


def test_old_function_calls_become_calls_of_tools() -> None:
    called = {"name": "f", "arguments": "{}"}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "f", "content": "5"},
    ]
    assert json.loads(prompt_of(messages=messages).messages_json) == [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": called}],
        },
        {"role": "tool", "name": "f", "content": "5", "tool_call_id": "call_1"},
    ]


def test_reasoning_reaches_the_template_under_its_own_name() -> None:
    messages = [USER, {"role": "assistant", "content": "a", "reasoning": "hm"}, USER]
    packed = json.loads(prompt_of(messages=messages).messages_json)
    assert packed[1]["reasoning_content"] == "hm"


def test_an_echo_with_logprobs_goes_round_the_ring_for_them() -> None:
    body = {"model": "demo", "prompt": [[1, 2]], "echo": True, "logprobs": 3, "max_tokens": 0}
    request = parse_completion(body, Warnings())
    assert not request.generate.prompt_only
    assert request.options.prompt_alone
    sampling = request.generate.sampling
    assert (sampling.max_tokens, sampling.num_prompt_logprobs, sampling.num_logprobs) == (1, 3, 3)
    plain = parse_completion({**body, "echo": False, "max_tokens": 1}, Warnings())
    assert plain.generate.sampling.num_prompt_logprobs == -1
