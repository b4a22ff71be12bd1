"""Grammars of tool calls: each takes right calls and no wrong ones, and leads to right ones."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.answer_grammar import compose
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import Refused, TemplateFormat
from services.tokenizer.parameter_values import kinds_by_function
from tests.cases import num_cases
from tests.unit.detokenizer.answer.answers import parse
from tests.unit.tokenizer.schema_strategies import SCHEMAS, objects
from tests.unit.tokenizer.walks import Model, model, tool
from tests.unit.tokenizer.written_calls import (
    EVERY_FORMAT,
    FORMATS,
    NOW,
    OSLO,
    READ,
    SUM,
    TIME,
    TOOLS,
    Call,
    hermes,
    llama_json,
    mistral,
    read,
    written,
)

EVERY_MODEL = pytest.mark.parametrize("kind", ["tokens", "text"])


def grammar_spec(
    name: str, subject: Model, use: ToolUse, tools: Any = TOOLS, **rules: Any
) -> GrammarSpec:
    tool_format, template, _ = FORMATS[name]
    composed = compose(
        OutputRules(tools=use, **rules),
        tools,
        TemplateFormat(tool_format, template=template),
        subject.vocabulary,
    )
    assert composed is not None
    return composed


@EVERY_MODEL
@EVERY_FORMAT
def test_a_required_call_is_one_of_the_tools_with_its_own_arguments(name: str, kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(name, subject, ToolUse("required"))
    for right in ([OSLO], [SUM], [TIME], [OSLO, SUM], [TIME, TIME, OSLO]):
        assert subject.takes(rules, written(name, *right)), right
    wrong: list[Call] = [
        ("get_weather", {"days": 1}),
        ("get_weather", {"city": "Oslo", "days": "two"}),
        ("get_weather", {"city": "Oslo", "other": 1}),
        ("calculator", {"city": "Oslo"}),
        ("calculator", {"expression": ""}),
        ("now", {"city": "Oslo"}),
        ("rm", {}),
    ]
    for call in wrong:
        assert not subject.takes(rules, written(name, call)), call
        assert not subject.takes(rules, written(name, OSLO, call)), call
    assert not subject.takes(rules, "It is sunny in Oslo.")
    assert not subject.takes(rules, "")


@EVERY_MODEL
@EVERY_FORMAT
def test_a_named_call_is_one_call_of_that_function(name: str, kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(name, subject, ToolUse("named", "calculator"))
    assert subject.takes(rules, written(name, SUM))
    assert not subject.takes(rules, written(name, OSLO))
    assert not subject.takes(rules, written(name, SUM, SUM))


@EVERY_FORMAT
def test_without_parallel_calls_there_is_one(name: str) -> None:
    subject = model()
    rules = grammar_spec(name, subject, ToolUse("required", parallel=False))
    assert subject.takes(rules, written(name, OSLO))
    assert not subject.takes(rules, written(name, OSLO, OSLO))


def test_llama_may_write_its_token_first() -> None:
    subject = model()
    rules = grammar_spec("llama_json", subject, ToolUse("required"))
    assert subject.takes(rules, "<|python_tag|>" + llama_json([OSLO]))
    without = model("text")
    rules = grammar_spec("llama_json", without, ToolUse("required"))
    assert not without.takes(rules, "<|python_tag|>" + llama_json([OSLO]))


def test_mistral_writes_a_blank_or_none_and_maybe_an_id() -> None:
    subject = model()
    rules = grammar_spec("mistral", subject, ToolUse("required"))
    assert subject.takes(rules, mistral([OSLO]).replace("] [", "][", 1))
    with_id = compose(
        OutputRules(tools=ToolUse("required")),
        TOOLS,
        TemplateFormat("mistral", template="[CALL_ID] [ARGS]"),
        subject.vocabulary,
    )
    assert subject.takes(with_id, "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}")
    assert subject.takes(with_id, "[TOOL_CALLS]now[ARGS]{}")
    assert not subject.takes(with_id, "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}")


def test_a_special_token_cannot_be_spelled() -> None:
    subject = model()
    rules = grammar_spec("mistral with args", subject, ToolUse("required"))
    spelled = [token for letter in "[TOOL_CALLS]" for token in subject.ids(letter)]
    assert not subject.takes_ids(rules, spelled + subject.ids("now[ARGS]{}"))


def test_a_pythonic_call_leaves_out_what_is_optional() -> None:
    subject = model()
    parameters = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("a", "b", "c", "d")},
        "required": ["c"],
    }
    rules = grammar_spec("llama_pythonic", subject, ToolUse("required"), [tool("f", parameters)])
    for right in ("c=1", "a=1, c=1", "b=2, c=-1", "a=1, b=2, c=3, d=4", "c=1, d=2"):
        assert subject.takes(rules, f"[f({right})]"), right
    for wrong in ("", "a=1", "d=1", "c=1, a=2", ", c=1", "a=1c=2", "c=True"):
        assert not subject.takes(rules, f"[f({wrong})]"), wrong


def test_references_into_the_parameters_stay_true_in_every_format() -> None:
    tree = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "leaf": {"$ref": "#/properties/size"}},
        "additionalProperties": False,
    }
    tree["properties"]["size"] = {"type": "integer"}  # type: ignore[index]
    subject = model()
    given = {"child": {"child": {"size": 1}}, "leaf": 2}
    for name in ("hermes", "llama_json", "mistral", "glm", "qwen3_coder"):
        rules = grammar_spec(name, subject, ToolUse("required"), [tool("f", tree)])
        assert subject.takes(rules, written(name, ("f", given))), name
        assert not subject.takes(rules, written(name, ("f", {"child": {"leaf": "x"}}))), name


def test_keywords_that_cannot_be_enforced_matter_to_strict_tools_only() -> None:
    parameters = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {}, "uniqueItems": True}},
        "required": ["tags"],
    }
    subject = model()
    rules = grammar_spec("hermes", subject, ToolUse("required"), [tool("f", parameters)])
    assert subject.takes(rules, hermes([("f", {"tags": [1]})]))
    with pytest.raises(Refused, match="uniqueItems") as caught:
        grammar_spec(
            "hermes", subject, ToolUse("required"), [NOW, tool("f", parameters, strict=True)]
        )
    assert caught.value.failure.field == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("use", "tools", "tool_format", "field"),
    [
        (ToolUse("required"), TOOLS, "", "tool_choice"),
        (ToolUse("named", "now"), TOOLS, "", "tool_choice"),
        (
            ToolUse("required"),
            [tool("f", {"properties": {"a": {"type": "fish"}}})],
            "hermes",
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_field(
    use: ToolUse, tools: Any, tool_format: str, field: str
) -> None:
    with pytest.raises(Refused) as caught:
        compose(
            OutputRules(tools=use),
            tools,
            TemplateFormat(tool_format),
            model().vocabulary,
        )
    failure = caught.value.failure
    assert (failure.status, failure.field) == (400, field)


# A parameter's schema, what stands between its tags, and what does not.
VALUES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ["", "5", "null", "two\nlines\n", "<b>", '"q"'], []),
    ({"type": ["string", "null"]}, ["Oslo", "null", "nullable", "5", '"q"', "[x]"], ["None"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ["Oslo", "null"], []),
    ({"type": ["string", "integer"]}, ["Oslo", "5", "true"], ["5 of them", "-"]),
    ({"enum": ["a", "b", 3]}, ["a", "3"], ["c", '"a"', "4"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["abc", "1\n2"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ["aa", '"b"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ["2024-02-29", '"2023-02-29"']),
    ({"type": "string", "format": "path"}, ["/etc/hosts"], []),
    ({"type": "integer", "minimum": 1}, ["7"], ["x", '"7"', "0", "7.5"]),
    ({"type": "array", "items": {"type": "string"}}, ['["x", "</parameter>"]'], ["x", "[1]"]),
    ({}, ["x", "7", "null", '{"a": 1}', "[1]", "true", "trueish"], ["7x"]),
    ({"anyOf": [{"type": "string"}, {"const": True}]}, ["true", "x", "0"], ["false"]),
    ({"allOf": [{"$ref": "#/$defs/unit"}]}, ['"C"'], ["C", '"F"']),
    ({"$ref": "#/$defs/unit"}, ["C"], ['"C"', "F"]),
]


@EVERY_MODEL
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in READ])
def test_values_between_tags_are_by_their_schemas_and_read_by_their_kinds(
    name: str, kind: str
) -> None:
    subject, (tool_format, _, write) = model(kind), FORMATS[name]
    for schema, right, wrong in VALUES:
        fields = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        tools = [tool("f", {**fields, "$defs": {"unit": {"enum": ["C"]}}}, strict=True)]
        rules = grammar_spec(name, subject, ToolUse("required"), tools)
        kinds = kinds_by_function(functions_of(tools))
        for value in right:
            text = write([("f", {"a": value})])
            assert subject.takes(rules, text), (schema, value)
            ((_, arguments),) = parse(list(text), tool_format, kinds=kinds).calls
            jsonschema.validate(json.loads(arguments), tools[0]["function"]["parameters"])
        for value in wrong:
            assert not subject.takes(rules, write([("f", {"a": value})])), (schema, value)


@pytest.mark.parametrize("name", READ)
@given(
    parameters=st.lists(objects(SCHEMAS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 60),
)
@settings(max_examples=num_cases(8, exploring=40))
def test_whatever_obeys_the_masks_and_ends_is_a_valid_call(
    name: str, parameters: list[Any], seed: int, num_free: int
) -> None:
    subject = model()
    tools = [tool(f"f_{number}", schema, strict=True) for number, schema in enumerate(parameters)]
    rules = grammar_spec(name, subject, ToolUse("required"), tools)
    text = subject.walk(rules, Random(seed), num_free)
    if text is None:
        return
    calls = read(name, text)
    assert calls, text
    for called, given_arguments in calls:
        number = int(called.removeprefix("f_"))
        jsonschema.validate(given_arguments, parameters[number])
