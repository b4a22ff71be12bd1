"""What the tokenizer's grammars let a model write, the detokenizer's parsers read as it was meant.

Neither service knows the other: they share the table of formats, and this test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.tokenize import OutputRules, Structure, ToolUse
from common.parameter_kinds import pack_kinds, unpack_kinds
from services.detokenizer.answer.formats import reasoning_parser, tool_parser
from services.detokenizer.answer.parser import AnswerParser
from services.tokenizer.answer_grammar import compose
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import ReasoningStage, TemplateFormat
from services.tokenizer.parameter_values import kinds_by_function
from tests.cases import num_cases
from tests.unit.tokenizer.schema_strategies import SCHEMAS, objects
from tests.unit.tokenizer.walks import model, tool
from tests.unit.tokenizer.written_calls import FORMATS

HUGE = re.compile(r"\d[eE]\+?\d{3}")  # numbers that no float holds come back as something else
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Read:
    """An answer as the parsers take it apart."""

    def __init__(
        self,
        text: str,
        tool_format: str,
        reasoning_format: str,
        is_open: bool,
        tools: Sequence[Any] = (),
    ) -> None:
        kinds = unpack_kinds(pack_kinds(kinds_by_function(functions_of(list(tools)))))
        parser = AnswerParser(
            reasoning_parser(reasoning_format, is_open), tool_parser(tool_format, kinds), str
        )
        self.content = self.reasoning = ""
        self.names: list[str] = []
        self.arguments: list[str] = []
        for part in (*parser.push(text), *parser.finish()):
            match part.kind:
                case "content":
                    self.content += part.text
                case "reasoning":
                    self.reasoning += part.text
                case "call":
                    self.names.append(part.text)
                    self.arguments.append("")
                case "arguments":
                    self.arguments[part.index] += part.text


@pytest.mark.parametrize("name", FORMATS)
@given(
    parameters=st.lists(objects(SCHEMAS), min_size=1, max_size=3),
    stage=st.sampled_from(["inside", "before", "behind"]),
    with_structure=st.booleans(),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 60),
)
@settings(max_examples=num_cases(8, exploring=40))
def test_calls_and_structures_come_out_as_they_went_in(
    name: str,
    parameters: list[Any],
    stage: ReasoningStage,
    with_structure: bool,
    seed: int,
    num_free: int,
) -> None:
    tool_format, template, _ = FORMATS[name]
    subject = model()
    tools = [tool(f"f_{number}", schema, strict=True) for number, schema in enumerate(parameters)]
    structure = Structure("json_schema", json.dumps(PERSON), "response_format")
    rules = OutputRules(
        structure=structure if with_structure else None,
        tools=ToolUse("auto" if with_structure else "required"),
    )
    reasoning = "harmony" if tool_format == "harmony" else "think"
    speech = TemplateFormat(tool_format, reasoning, stage, template)
    grammar_spec = compose(rules, tools, speech, subject.vocabulary)
    assert grammar_spec is not None
    text = subject.walk(grammar_spec, Random(seed), num_free)
    if text is None or HUGE.search(text):
        return
    read = Read(text, tool_format, reasoning, stage == "inside", tools)
    if read.names:
        assert not read.content.strip(), text
        for called, arguments in zip(read.names, read.arguments, strict=True):
            jsonschema.validate(json.loads(arguments), parameters[int(called.removeprefix("f_"))])
    else:
        assert with_structure, text
        jsonschema.validate(json.loads(read.content), PERSON)


@pytest.mark.parametrize("kind", ["tokens", "text"])
@given(
    stage=st.sampled_from(["inside", "before"]),
    budget=st.integers(-1, 20),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 60),
)
@settings(deadline=None)
def test_an_answer_after_reasoning_matches_alone(
    kind: str, stage: ReasoningStage, budget: int, seed: int, num_free: int
) -> None:
    subject = model(kind)
    structure = Structure("regex", "[a-z]{1,9}", "structured_outputs.regex")
    rules = OutputRules(structure=structure, thinking_budget=budget)
    grammar_spec = compose(rules, [], TemplateFormat("", "think", stage), subject.vocabulary)
    assert grammar_spec is not None
    text = subject.walk(grammar_spec, Random(seed), num_free)
    if text is not None:
        content = Read(text, "", "think", stage == "inside").content
        assert content.isascii() and content.isalpha() and len(content) <= 9
