"""What the tokenizer's grammars let a model write, the detokenizer's parsers read as calls."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolInput, ToolUse
from services.compute.config import ComputeSettings
from services.router.openai.tools import MAX_TOOLS
from services.router.responses.tools import CustomInput
from services.tokenizer.answer_grammar import compose
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import TemplateFormat
from services.tokenizer.parameter_values import kinds_by_function
from tests.cases import num_cases
from tests.unit.detokenizer.answer.answers import parse
from tests.unit.tokenizer.walks import Model, model, tool
from tests.unit.tokenizer.written_calls import FORMATS as FORMATS_OF_CALLS

ANY = {"type": "object"}
FIELDS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "exact": {"type": "boolean"},
        "more": {"type": "array", "items": {"type": ["string", "boolean", "number"]}},
        "deep": {"type": "object", "properties": {"größe": {"type": "string"}}},
    },
    "required": ["city", "exact", "more"],
    "additionalProperties": False,
}
BANK = "mcp:bank/2-fa"
TOOLS = [tool("get_weather", FIELDS), tool("now", {**ANY, "properties": {}}), tool(BANK, FIELDS)]
SCHEMAS: dict[str, Any] = {"get_weather": FIELDS, "now": ANY, BANK: FIELDS}

# The format, and what its template has in it.
FORMATS = [
    ("hermes", ""),
    ("llama_json", ""),
    ("llama_pythonic", ""),
    ("mistral", ""),
    ("mistral", "[ARGS]"),
    ("mistral", "[CALL_ID] [ARGS]"),
    ("deepseek", ""),
    ("deepseek", "```json"),
    ("qwen3_coder", ""),
    ("glm", ""),
    ("glm", "</arg_key><arg_value>"),
    ("minimax", ""),
    ("kimi_k2", ""),
    ("harmony", ""),
]


def grammar_spec(subject: Model, tool_format: str, template: str, reasoning: str) -> GrammarSpec:
    speech = TemplateFormat(tool_format, reasoning, "inside" if reasoning else "behind", template)
    rules = OutputRules(tools=ToolUse("required"), thinking_budget=5 if reasoning else -1)
    composed = compose(rules, TOOLS, speech, subject.vocabulary)
    assert composed is not None
    return composed


@pytest.mark.parametrize(("tool_format", "template"), FORMATS)
@given(
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 60),
    kind=st.sampled_from(["tokens", "text"]),
    reasoning=st.sampled_from(["", "deepseek_r1"]),
)
@settings(max_examples=num_cases(12, exploring=50))
def test_required_calls_are_read_as_calls_with_valid_arguments(
    tool_format: str, template: str, seed: int, num_free: int, kind: str, reasoning: str
) -> None:
    subject = model(kind)
    text = subject.walk(
        grammar_spec(subject, tool_format, template, reasoning), Random(seed), num_free
    )
    if text is None:
        return
    kinds = kinds_by_function(functions_of(TOOLS))
    answer = parse(list(text), tool_format, reasoning, is_open=True, kinds=kinds)
    assert answer.calls, text
    assert answer.content == "", text
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(("tool_format", "template"), FORMATS)
@given(seed=st.integers(0, 2**32), num_free=st.integers(0, 60))
@settings(max_examples=num_cases(8, exploring=20))
def test_the_text_of_a_custom_tool_is_read_as_its_grammar_has_it(
    tool_format: str, template: str, seed: int, num_free: int
) -> None:
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    lark = 'start: "begin\\n" LINE* "\\"end\\""\nLINE: "+" /[^\\n]*/ "\\n"'
    use = ToolUse("required", inputs=(ToolInput("patch", lark),))
    tools = [tool("patch", text, strict=True)]
    subject = model()
    rules = OutputRules(tools=use)
    composed = compose(
        rules, tools, TemplateFormat(tool_format, template=template), subject.vocabulary
    )
    assert composed is not None
    written = subject.walk(composed, Random(seed), num_free)
    if written is None:
        return
    kinds = kinds_by_function(functions_of(tools, use.inputs))
    for name, arguments in parse(list(written), tool_format, kinds=kinds).calls:
        assert name == "patch"
        assert re.fullmatch(r'begin\n(\+[^\n]*\n)*"end"', CustomInput().push(arguments)), written


@pytest.mark.parametrize("name", ["hermes", "glm"])
def test_one_of_a_thousand_tools_is_written_and_read(name: str) -> None:
    fields = {
        "type": "object",
        "properties": {f"field_{at}": {"type": "string"} for at in range(8)},
        "required": ["field_0"],
    }
    tools = [tool(f"mcp:server-{at}/do", fields) for at in range(MAX_TOOLS)]
    subject = model()
    rules = OutputRules(tools=ToolUse("required"))
    composed = compose(rules, tools, TemplateFormat(name), subject.vocabulary)
    assert composed is not None
    assert len(composed.grammar) <= ComputeSettings().max_grammar_bytes
    text = FORMATS_OF_CALLS[name][2]([("mcp:server-999/do", {"field_0": "x"})])
    assert subject.takes(composed, text)
    assert not subject.takes(composed, text.replace("999", "9999"))
    (call,) = parse(list(text), name).calls
    assert list(call) == ["mcp:server-999/do", '{"field_0": "x"}']
