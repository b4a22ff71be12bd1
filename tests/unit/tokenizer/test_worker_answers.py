"""Jobs say what is known of an answer in advance: its formats, its grammar, its tools' kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.messages.arrays import int32s
from common.messages.tokenize import (
    IdsPrompt,
    OutputRules,
    Structure,
    TextPrompt,
    ToolUse,
)
from common.parameter_kinds import unpack_kinds
from common.tokenized import ExpectedAnswer
from services.tokenizer.jobs import Job
from tests.unit.tokenizer.encoders import HELLO, TOOL, answer, chat, encoder, refused, speaking

REQUIRED = OutputRules(tools=ToolUse("required"))


@pytest.mark.parametrize(
    ("template", "kwargs", "expected"),
    [
        ("chatml", {}, ExpectedAnswer()),
        ("qwen3_thinking", {}, ExpectedAnswer(None, "hermes", "think", False)),
        (
            "qwen3_thinking",
            {"enable_thinking": False},
            ExpectedAnswer(None, "hermes", "think", False),
        ),
        ("deepseek_v3_fenced", {}, ExpectedAnswer(None, "deepseek", "deepseek_r1", True)),
        ("deepseek_v31_switch", {}, ExpectedAnswer(None, "deepseek", "think", False)),
        (
            "deepseek_v31_switch",
            {"thinking": True},
            ExpectedAnswer(None, "deepseek", "think", True),
        ),
        ("mistral_v3_tools", {}, ExpectedAnswer(None, "mistral", "", False)),
        ("glm_xml_tools", {}, ExpectedAnswer(None, "glm", "think", False)),
        ("minimax_m2_thinking", {}, ExpectedAnswer(None, "minimax", "think", True)),
        ("harmony_macros", {}, ExpectedAnswer(None, "harmony", "harmony", False)),
    ],
)
def test_the_formats_of_an_answer_are_read_off_the_template_and_the_prompt(
    template: str, kwargs: dict[str, Any], expected: ExpectedAnswer, tmp_path: Path
) -> None:
    variables = json.dumps(kwargs).encode()
    job = chat(HELLO, tools_json=json.dumps([TOOL]).encode(), template_kwargs_json=variables)
    assert answer(speaking(tmp_path, template), job) == expected


def test_the_kinds_of_parameters_are_told_where_values_stand_as_they_are(tmp_path: Path) -> None:
    fields = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": fields}}])
    job = replace(chat(HELLO, tools_json=tools.encode()), rules=OutputRules(tools=ToolUse("auto")))
    packed = answer(speaking(tmp_path, "qwen3_coder_tools"), job).parameter_kinds
    assert unpack_kinds(packed) == {"f": {"a": "t", "b": "i"}}
    assert answer(speaking(tmp_path, "hermes_tools"), job).parameter_kinds == b""


def test_settings_go_over_the_template(tmp_path: Path) -> None:
    subject = speaking(tmp_path, "qwen3_thinking", tool_format="none", reasoning_format="none")
    assert answer(subject, chat(HELLO)) == ExpectedAnswer()
    subject = speaking(tmp_path, "chatml", tool_format="mistral", reasoning_format="magistral")
    assert answer(subject, chat(HELLO)) == ExpectedAnswer(None, "mistral", "magistral", False)


def test_a_continued_thought_is_open(tmp_path: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "<think>\nI was"}]
    job = chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert answer(speaking(tmp_path, "chatml", reasoning_format="think"), job).reasoning_open


def test_rules_become_guidance(tmp_path: Path) -> None:
    subject = speaking(tmp_path, "qwen3_thinking")
    rules = OutputRules(
        structure=Structure("choice", '["a", "b"]', "structured_outputs.choice"),
        allowed_token_ids=(1, 2),
        bad_words=("dog",),
    )
    grammar_spec = answer(subject, Job(chat(HELLO).prompt, 0.0, rules=rules)).grammar_spec
    assert grammar_spec is not None and grammar_spec.field == "structured_outputs.choice"
    assert '"a" | "b"' in grammar_spec.grammar and "thoughts" in grammar_spec.grammar
    assert grammar_spec.allowed_token_ids == (1, 2) and len(grammar_spec.banned_sequences) == 2
    for prompt in (TextPrompt("a"), IdsPrompt(int32s([1]))):
        grammar_spec = answer(subject, Job(prompt, 0.0, rules=rules)).grammar_spec
        assert grammar_spec is not None and "thoughts" not in grammar_spec.grammar


@pytest.mark.parametrize(
    ("template", "by_template"),
    [("qwen3_thinking", True), ("deepseek_v31_switch", True), ("harmony_macros", False),
     ("magistral_v13", False)],
)  # fmt: skip
def test_a_grammar_keeps_from_reasoning_where_a_template_cannot(
    template: str, by_template: bool, tmp_path: Path
) -> None:
    """As where the effort is none: the switches are off, and there is no token for it."""
    variables = {"enable_thinking": False, "thinking": False}
    job = chat(HELLO, template_kwargs_json=json.dumps(variables).encode())
    job = replace(job, rules=OutputRules(thinking_budget=0))
    spec = answer(speaking(tmp_path, template), job).grammar_spec
    assert (spec is None) == by_template


def test_required_tools_become_guidance(tmp_path: Path) -> None:
    job = chat(HELLO, tools_json=json.dumps([TOOL]).encode())
    job = Job(job.prompt, 0.0, rules=REQUIRED)
    grammar_spec = answer(speaking(tmp_path, "qwen25_tools"), job).grammar_spec
    assert (
        grammar_spec is not None
        and grammar_spec.field == "tools"
        and "look" in grammar_spec.grammar
    )


def test_one_call_is_required_where_the_template_renders_one(tmp_path: Path) -> None:
    job = chat(HELLO, tools_json=json.dumps([TOOL]).encode())
    job = Job(job.prompt, 0.0, rules=REQUIRED)
    grammar_spec = answer(speaking(tmp_path, "llama31_tools"), job).grammar_spec
    assert grammar_spec is not None and "{0,31}" not in grammar_spec.grammar
    grammar_spec = answer(speaking(tmp_path, "qwen25_tools"), job).grammar_spec
    assert grammar_spec is not None and "{0,31}" in grammar_spec.grammar


@pytest.mark.parametrize(
    ("template", "tools", "rules", "field"),
    [
        ("chatml", [TOOL], REQUIRED, "tool_choice"),
        (
            "chatml",
            [],
            OutputRules(structure=Structure("json_schema", "{", "response_format")),
            "response_format",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused_by_field(
    template: str, tools: list[Any], rules: OutputRules, field: str, tmp_path: Path
) -> None:
    encoded = json.dumps(tools).encode() if tools else b""
    job = Job(chat(HELLO, tools_json=encoded).prompt, 0.0, rules=rules)
    failure = refused(speaking(tmp_path, template), job)
    assert (failure.status, failure.field) == (400, field)


def test_composing_is_inside_the_limits(tmp_path: Path) -> None:
    entered: list[str] = []

    @contextmanager
    def limits() -> Iterator[None]:
        entered.append("in")
        yield
        raise MemoryError

    subject = encoder(tmp_path)
    subject._limits = limits
    rules = OutputRules(structure=Structure("grammar", 'root ::= "a"', "structured_outputs"))
    outcome = subject.run(Job(TextPrompt("x"), 0.0, rules=rules))
    assert entered == ["in"] and outcome.retiring
    assert outcome.failure is not None and outcome.failure.field == "structured_outputs"


def test_a_grammar_as_deep_as_a_well_is_refused(tmp_path: Path) -> None:
    text = "root ::= " + "(" * 5000 + '"a"' + ")" * 5000
    rules = OutputRules(structure=Structure("grammar", text, "structured_outputs.grammar"))
    failure = refused(encoder(tmp_path), Job(TextPrompt("x"), 0.0, rules=rules))
    assert (failure.status, failure.field) == (400, "structured_outputs.grammar")
