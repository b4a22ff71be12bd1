"""Grammars of tool calls: each takes right calls and no wrong ones, and leads to right ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.answer_grammar import TemplateFormat, compose
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import Refused
from tests.cases import num_cases
from tests.unit.tokenizer.walks import Model, compact, model, tool

WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CALCULATOR = tool(
    "calculator",
    {
        "type": "object",
        "properties": {
            "expression": {"$ref": "#/$defs/text"},
            "exact": {"type": ["boolean", "null"]},
        },
        "required": ["expression"],
        "$defs": {"text": {"type": "string", "minLength": 1}},
    },
    strict=True,
)
NOW = tool("now")
TOOLS = [WEATHER, CALCULATOR, NOW]

Call = tuple[str, dict[str, Any]]
OSLO: Call = ("get_weather", {"city": "Oslo"})
SUM: Call = ("calculator", {"expression": "1 + 2", "exact": None})
TIME: Call = ("now", {})


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {compact(given)}}}\n</tool_call>'
        for name, given in calls
    )


def llama_json(calls: list[Call]) -> str:
    return "; ".join(compact({"name": name, "parameters": given}) for name, given in calls)


def llama_pythonic(calls: list[Call]) -> str:
    def written(call: Call) -> str:
        name, given = call
        python = {True: "True", False: "False", None: "None"}
        values = (
            f"{key}={python[value] if value is None or isinstance(value, bool) else compact(value)}"
            for key, value in given.items()
        )
        return f"{name}({', '.join(values)})"

    return f"[{', '.join(map(written, calls))}]"


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + compact([{"name": name, "arguments": given} for name, given in calls])


def mistral_args(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(given)}" for name, given in calls)


def deepseek_fenced(calls: list[Call]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(given)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek(calls: list[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


# The format, what its template has in it, and how it writes calls.
FORMATS: dict[str, tuple[str, str, Callable[[list[Call]], str]]] = {
    "hermes": ("hermes", "", hermes),
    "llama_json": ("llama_json", "", llama_json),
    "llama_pythonic": ("llama_pythonic", "", llama_pythonic),
    "mistral": ("mistral", "", mistral),
    "mistral with args": ("mistral", "[ARGS]", mistral_args),
    "deepseek in fences": ("deepseek", "```json", deepseek_fenced),
    "deepseek": ("deepseek", "", deepseek),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
EVERY_MODEL = pytest.mark.parametrize("kind", ["tokens", "text"])


def grammar_spec(
    name: str, subject: Model, use: ToolUse, tools: Any = TOOLS, **rules: Any
) -> GrammarSpec:
    tool_format, template, _ = FORMATS[name]
    composed = compose(
        OutputRules(tools=use, **rules),
        functions_of(tools),
        TemplateFormat(tool_format, template=template),
        subject.vocabulary,
    )
    assert composed is not None
    return composed


def written(name: str, *calls: Call) -> str:
    return FORMATS[name][2](list(calls))


@EVERY_MODEL
@EVERY_FORMAT
def test_a_required_call_is_one_of_the_tools_with_its_own_arguments(name: str, kind: str) -> None:
    subject = model(kind)
    rules = grammar_spec(name, subject, ToolUse("required"))
    for right in ([OSLO], [SUM], [TIME], [OSLO, SUM], [TIME, TIME, OSLO]):
        assert subject.takes(rules, written(name, *right)), right
    wrong: list[Call] = [
        ("get_weather", {"days": 1}),
        ("get_weather", {"city": 1}),
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
        functions_of(TOOLS),
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
    for name in ("hermes", "llama_json", "mistral"):
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
        (ToolUse("named", "gone"), TOOLS, "hermes", "tool_choice"),
        (ToolUse("required"), [], "hermes", "tool_choice"),
        (ToolUse("auto"), [{"type": "function"}], "hermes", "tools[0]"),
        (ToolUse("auto"), [NOW, {"function": {"name": ""}}], "hermes", "tools[1].function"),
        (
            ToolUse("auto"),
            [tool("f", {"type": "array"})],
            "hermes",
            "tools[0].function.parameters",
        ),
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
            functions_of(tools),
            TemplateFormat(tool_format),
            model().vocabulary,
        )
    failure = caught.value.failure
    assert (failure.status, failure.field) == (400, field)


LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "enum": ["red", "ünï", 'q"uote', "new\nline"]},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["string", "null"]},
        {"type": ["boolean", "integer"]},
        {"const": {"a": [1, None]}},
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
        {},
    ]
)
KEYS = st.sampled_from(["a", "b", "city_name", "x1", "größe"])


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any], needed: list[str]) -> dict[str, Any]:
        required = [name for name in needed if name in properties]
        return {"type": "object", "properties": properties, "required": required}

    return st.builds(made, st.dictionaries(KEYS, values, max_size=4), st.lists(KEYS, unique=True))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: objects(inner) | st.builds(lambda i: {"type": "array", "items": i}, inner),
    max_leaves=6,
)


@EVERY_FORMAT
@given(
    parameters=st.lists(objects(SCHEMAS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 60),
)
@settings(max_examples=num_cases(12, exploring=40))
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


def read(name: str, text: str) -> list[Call]:
    """Read calls back with as little knowledge of the formats as will do."""
    match name:
        case "hermes":
            bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>(?:\n|$)", text, re.DOTALL)
            return [(body["name"], body["arguments"]) for body in map(json.loads, bodies)]
        case "llama_json":
            return list(_objects(text.removeprefix("<|python_tag|>")))
        case "mistral":
            calls = json.loads(text.removeprefix("[TOOL_CALLS]"))
            return [(call["name"], call["arguments"]) for call in calls]
        case "mistral with args":
            parts = [part.split("[ARGS]", 1) for part in text.split("[TOOL_CALLS]")[1:]]
            return [(called, json.loads(arguments)) for called, arguments in parts]
        case "llama_pythonic":
            return list(_pythonic(text))
        case _:
            pattern = (
                r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(\w+)\n```json\n(.*?)\n```"
                r"|(\w+)<｜tool▁sep｜>(.*?))<｜tool▁call▁end｜>"
            )
            found = re.findall(pattern, text, re.DOTALL)
            return [(a or c, json.loads(b or d)) for a, b, c, d in found]


def _objects(text: str) -> Any:
    while text:
        call, end = json.JSONDecoder().raw_decode(text.lstrip())
        yield call["name"], call["parameters"]
        text = text.lstrip()[end:].lstrip().removeprefix("; ")


def _pythonic(text: str) -> Any:
    decoder = json.JSONDecoder()
    words = {"True": True, "False": False, "None": None}
    at = 1
    while text[at] != "]":
        head = re.compile(r"(?:, )?(\w+)\(").match(text, at)
        assert head, text[at:]
        at, given_arguments = head.end(), {}
        while text[at:].lstrip()[0] != ")":
            key = re.compile(r"\s*(?:, )?(\w+)=").match(text, at)
            assert key, text[at:]
            word = re.compile(r"True|False|None").match(text, key.end())
            if word:
                given_arguments[key[1]], at = words[word[0]], word.end()
            else:
                blank = re.compile(r"\s*").match(text, key.end())
                assert blank
                given_arguments[key[1]], at = decoder.raw_decode(text, blank.end())
        at = text.index(")", at) + 1
        yield head[1], given_arguments
