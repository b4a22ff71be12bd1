"""With tool_choice auto text is free, but calls are held to strict functions and their number."""

from __future__ import annotations

from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_formats import TOOL_FORMATS
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.answer_grammar import compose
from services.tokenizer.jobs import TemplateFormat
from tests.cases import num_cases
from tests.unit.tokenizer.walks import model
from tests.unit.tokenizer.written_calls import (
    CALCULATOR,
    FORMATS,
    NOW,
    OSLO,
    SUM,
    TIME,
    WEATHER,
    read,
    written,
)

WATCHED = [name for name in FORMATS if not name.startswith(("llama", "harmony"))]
WRONG = ("calculator", {"expression": "7", "exact": "maybe"})
AUTO, ONE = ToolUse("auto"), ToolUse("auto", parallel=False)


def grammar_spec(
    name: str, use: ToolUse, tools: Any, kind: str = "tokens", **speech: Any
) -> GrammarSpec | None:
    tool_format, template, _ = FORMATS[name]
    return compose(
        OutputRules(tools=use),
        tools,
        TemplateFormat(tool_format, template=template, **speech),
        model(kind).vocabulary,
    )


@pytest.mark.parametrize("name", WATCHED)
def test_a_strict_functions_calls_are_right_wherever_they_begin(name: str) -> None:
    rules = grammar_spec(name, AUTO, [CALCULATOR, WEATHER])
    subject = model()
    for right in (
        "I do not need a tool. <b>1 < 2</b>",
        "",
        written(name, SUM),
        "I compute.\n" + written(name, SUM),
        written(name, SUM, SUM) + "\nDone.",
        written(name, SUM) + " and then " + written(name, OSLO),
    ):
        assert subject.takes(rules, right), right
    for wrong in (written(name, WRONG), "So: " + written(name, WRONG), written(name, TIME)):
        assert not subject.takes(rules, wrong), wrong


@pytest.mark.parametrize("name", WATCHED)
def test_functions_that_are_not_strict_get_any_object(name: str) -> None:
    rules = grammar_spec(name, AUTO, [CALCULATOR, WEATHER])
    assert model().takes(rules, written(name, ("get_weather", {"town": [1]})))


@pytest.mark.parametrize("name", WATCHED)
def test_no_parallel_calls_means_one_call(name: str) -> None:
    rules = grammar_spec(name, ONE, [NOW, WEATHER])
    subject = model()
    assert subject.takes(rules, "Let me see. " + written(name, TIME))
    assert subject.takes(rules, "No call.")
    assert not subject.takes(rules, written(name, TIME, TIME))
    assert not subject.takes(rules, written(name, TIME) + " and " + written(name, OSLO))


def test_harmonys_calls_are_right_among_messages_of_every_channel() -> None:
    rules = grammar_spec("harmony", AUTO, [CALCULATOR])
    subject = model()
    thought = "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I compute.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>3"
    right, wrong = written("harmony", SUM), written("harmony", WRONG)
    by_role = ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "1"}'
    for text in (final, thought + final, right, thought + preamble + right, thought + by_role):
        assert subject.takes(rules, text), text
    for text in (wrong, thought + wrong, preamble + wrong, right + thought):
        assert not subject.takes(rules, text), text
    assert grammar_spec("harmony", AUTO, [CALCULATOR], kind="text") is None


def test_where_nothing_is_wanted_or_nothing_can_be_done_text_is_free() -> None:
    assert grammar_spec("hermes", AUTO, [WEATHER, NOW]) is None
    for name in ("llama_json", "llama_pythonic"):
        assert grammar_spec(name, ONE, [CALCULATOR]) is None
    assert grammar_spec("hermes", AUTO, [CALCULATOR], kind="text") is None


def test_calls_are_watched_behind_the_reasoning() -> None:
    rules = grammar_spec("hermes", AUTO, [CALCULATOR], reasoning_format="think", stage="inside")
    subject = model()
    assert subject.takes(rules, "so</think>\n\nLet me see.\n" + written("hermes", SUM))
    assert not subject.takes(rules, "so</think>\n\n" + written("hermes", WRONG))
    assert not subject.takes(rules, "so")


@pytest.mark.parametrize("name", ["hermes", "deepseek", "deepseek in fences"])
@given(seed=st.integers(0, 2**32), num_free=st.integers(0, 40))
@settings(max_examples=num_cases(12, exploring=40))
def test_whatever_obeys_the_masks_has_right_calls_in_it(
    name: str, seed: int, num_free: int
) -> None:
    rules = grammar_spec(name, AUTO, [CALCULATOR])
    assert rules is not None
    begin = TOOL_FORMATS[FORMATS[name][0]].begin
    text = model().walk(rules, Random(seed), num_free, begun="So: " + begin)
    if text is None:
        return
    calls = read(name, text[text.index(begin) :])
    assert calls, text
    for called, given_arguments in calls:
        assert called == "calculator"
        jsonschema.validate(given_arguments, CALCULATOR["function"]["parameters"])
