"""Structural tags: free text in which tags begin what has a form."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, Structure, ToolUse
from services.tokenizer.answer_grammar import compose
from services.tokenizer.jobs import Refused, TemplateFormat
from tests.cases import num_cases
from tests.unit.tokenizer.walks import model, tool

FIELD = "response_format.format"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {"type": "regex", "pattern": "[0-9]{1,3}"}
TEXT = {"type": "any_text"}


def grammar_spec(
    layout: Any, speech: TemplateFormat | None = None, kind: str = "tokens"
) -> GrammarSpec:
    structure = Structure("structural_tag", json.dumps(layout), FIELD)
    composed = compose(
        OutputRules(structure), [], speech or TemplateFormat(), model(kind).vocabulary
    )
    assert composed is not None
    return composed


def tag(name: str, content: Any, end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": f"<f={name}>", "content": content, "end": end}


def triggered(**more: Any) -> dict[str, Any]:
    weather = tag("weather", {"type": "json_schema", "json_schema": CITY})
    tags = [weather, tag("count", NUMBER), {**tag("x", NUMBER), "begin": "[x]"}]
    return {"type": "triggered_tags", "triggers": ["<f=", "[x"], "tags": tags, **more}


OSLO = '<f=weather>{"city": "Oslo"}</f>'
FIVE = "<f=count>5</f>"


@pytest.mark.parametrize(
    ("more", "right", "wrong"),
    [
        (
            {},
            ["", "Hi <f f= [y]", OSLO, f"So: {OSLO} and\n{FIVE} or [x]7</f>!", FIVE + FIVE],
            ["<f=", "a <f=other>", "<f=count>a</f>", "<f=count>5", '<f=weather>{"town": ""}</f>'],
        ),
        (
            {"at_least_one": True},
            [OSLO, f"{FIVE} {OSLO}."],
            ["", "Hi", f"Hi {OSLO}"],
        ),
        ({"stop_after_first": True}, ["", "Hi", f"Hi {OSLO}"], [f"{OSLO} ", OSLO + FIVE]),
        (
            {"at_least_one": True, "stop_after_first": True},
            [OSLO, "[x]1</f>"],
            ["", "a", f"{OSLO} ", f" {OSLO}"],
        ),
        ({"excludes": ["bad"]}, ["ba d", OSLO, f"good {OSLO} good"], ["bad", f"bad {OSLO}"]),
    ],
)
def test_text_is_free_until_a_trigger(more: Any, right: list[str], wrong: list[str]) -> None:
    rules = grammar_spec(triggered(**more))
    assert [text for text in right if not model().takes(rules, text)] == []
    assert [text for text in wrong if model().takes(rules, text)] == []


@pytest.mark.parametrize(
    ("layout", "right", "wrong"),
    [
        ({"type": "const_string", "value": "a\n"}, ["a\n"], ["a", "", "a\nb"]),
        (TEXT, ["", "a\nb"], []),
        ({**TEXT, "excludes": ["b", "cc", ""]}, ["", "acd"], ["ab", "acc"]),
        (NUMBER, ["12"], ["a", ""]),
        ({"type": "grammar", "grammar": 'root ::= "a" "b"*'}, ["abb"], ["b"]),
        ({"type": "json_schema", "json_schema": True}, ["[1]", "null"], ["a"]),
        ({"type": "or", "elements": [NUMBER, tag("x", TEXT)]}, ["1", "<f=x>a</f>"], ["<f=x>a"]),
        ({"type": "sequence", "elements": [NUMBER, tag("x", TEXT)]}, ["1<f=x></f>"], ["1"]),
        ({"type": "sequence", "elements": [NUMBER, TEXT]}, ["1", "1 a\n"], ["a"]),
        (
            tag("x", TEXT, ["</f>", "</g>"]),
            ["<f=x>a<</g>", "<f=x></f>"],
            ["<f=x>", "<f=x></f></f>"],
        ),
        (tag("x", {"type": "or", "elements": [NUMBER, TEXT]}), ["<f=x>1</f>", "<f=x>a</f>"], ["a"]),
        (tag("x", tag("y", TEXT, "")), ["<f=x><f=y>a</f>"], ["<f=x>a</f>"]),
        (tag("x", triggered()), [f"<f=x>a {OSLO} b</f>", "<f=x></f>"], ["<f=x>a", f"<f=x>{FIVE}"]),
        (
            {"type": "tags_with_separator", "tags": [tag("x", NUMBER)], "separator": ", "},
            ["", "<f=x>1</f>", "<f=x>1</f>, <f=x>2</f>"],
            ["a", "<f=x>1</f><f=x>2</f>", "<f=x>1</f>, "],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("x", NUMBER)],
                "separator": "",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<f=x>1</f>"],
            ["", "<f=x>1</f><f=x>2</f>"],
        ),
        ({"type": "optional", "content": NUMBER}, ["", "1"], ["a"]),
        ({"type": "star", "content": tag("x", NUMBER)}, ["", "<f=x>1</f><f=x>1</f>"], ["1"]),
        ({"type": "plus", "content": tag("x", NUMBER)}, ["<f=x>1</f>"], [""]),
        (
            {"type": "repeat", "content": tag("x", NUMBER), "min": 2, "max": -1},
            ["<f=x>1</f><f=x>1</f>"],
            ["<f=x>1</f>"],
        ),
        ({"type": "repeat", "content": NUMBER, "max": 0}, [""], ["1"]),
    ],
)
def test_every_format(layout: Any, right: list[str], wrong: list[str]) -> None:
    rules = grammar_spec(layout)
    assert [text for text in right if not model().takes(rules, text)] == []
    assert [text for text in wrong if model().takes(rules, text)] == []


def test_json_of_a_tag_may_be_compact() -> None:
    layout = tag("x", {"type": "json_schema", "json_schema": CITY})
    structure = Structure("structural_tag", json.dumps(layout), FIELD, compact=True)
    rules = compose(OutputRules(structure), [], TemplateFormat(), model().vocabulary)
    assert model().takes(rules, '<f=x>{"city": "Oslo"}</f>')
    assert not model().takes(rules, '<f=x>{ "city": "Oslo"}</f>')


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_tags_may_be_special_tokens(kind: str) -> None:
    content = {"type": "json_schema", "json_schema": CITY}
    call = {"begin": "<tool_call>\n", "content": content, "end": "\n</tool_call>"}
    said = {"begin": "[TOOL_CALLS]say", "content": TEXT, "end": "\n</tool_call>"}
    layout = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>", "[TOOL_CALLS]"],
        "tags": [call, said],
    }
    rules = grammar_spec(layout, kind=kind)
    oslo = '<tool_call>\n{"city": "Oslo"}\n</tool_call>'
    for right in (
        "",
        "Hi\n",
        oslo,
        f"So:\n{oslo}\n{oslo} ok",
        "a[TOOL_CALLS]say\n\nx\n</tool_call>",
    ):
        assert model(kind).takes(rules, right), right
    for wrong in ("<tool_call>", "<tool_call>\n{}\n</tool_call>", "[TOOL_CALLS]say a</tool_call>"):
        assert not model(kind).takes(rules, wrong), wrong


def test_reasoning_and_calls_stand_before_and_beside_it() -> None:
    rules = grammar_spec(triggered(at_least_one=True), TemplateFormat("", "think", "inside"))
    assert model().takes(rules, f"so</think>\n\n{OSLO}")
    assert not model().takes(rules, f"so {OSLO}")
    structure = Structure("structural_tag", json.dumps(tag("x", NUMBER)), FIELD)
    both = compose(
        OutputRules(structure, tools=ToolUse("auto")),
        [tool("now", {"type": "object"})],
        TemplateFormat("hermes"),
        model().vocabulary,
    )
    assert model().takes(both, "<f=x>1</f>")
    assert model().takes(both, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    "layout",
    [
        [],
        "any_text",
        {},
        {"type": "qwen_xml_parameter", "json_schema": {}},
        {"type": ["any_text"]},
        {"type": "const_string"},
        {"type": "sequence", "elements": []},
        {"type": "sequence", "elements": [TEXT, NUMBER]},
        {"type": "sequence", "elements": [triggered(), NUMBER]},
        {"type": "or", "elements": [5]},
        {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
        {"type": "json_schema"},
        {"type": "star", "content": TEXT},
        {"type": "repeat", "content": NUMBER, "min": 3, "max": 2},
        {"type": "repeat", "content": NUMBER, "max": 1 << 40},
        {"type": "tag", "begin": "<x>", "content": TEXT},
        {"type": "tag", "begin": "<x>", "content": TEXT, "end": [1]},
        {"type": "tag", "begin": 5, "content": TEXT, "end": ""},
        triggered(triggers=["<g="]),
        triggered(triggers=[""]),
        triggered(triggers="<f="),
        triggered(tags=[]),
        triggered(excludes=[1]),
        {"type": "grammar", "grammar": "root ::= missing"},
    ],
)
def test_what_is_no_format_is_refused_by_field(layout: Any) -> None:
    with pytest.raises(Refused) as caught:
        grammar_spec(layout)
    failure = caught.value.failure
    assert (failure.status, failure.field) == (400, FIELD)


@given(seed=st.integers(0, 2**32), num_free=st.integers(0, 80))
@settings(max_examples=num_cases(12, exploring=40))
def test_whatever_obeys_the_masks_and_ends_has_whole_tags(seed: int, num_free: int) -> None:
    text = model().walk(grammar_spec(triggered()), Random(seed), num_free, "Well, <f=weather>")
    if text is None:
        return
    for piece in text.split("<f=")[1:]:
        name, _, rest = piece.partition(">")
        content = rest.partition("</f>")[0]
        assert name in ("weather", "count")
        assert content.isdigit() if name == "count" else set(json.loads(content)) == {"city"}


WORDS = st.text("ab<>=/ \n[]", max_size=6)
SIMPLE = st.one_of(
    st.fixed_dictionaries({"type": st.just("const_string"), "value": WORDS}),
    st.fixed_dictionaries({"type": st.just("any_text")}, optional={"excludes": st.lists(WORDS)}),
    st.sampled_from([NUMBER, {"type": "json_schema", "json_schema": CITY}]),
    st.dictionaries(st.sampled_from(["type", "value", "elements"]), WORDS | st.none()),
)


def _around(inner: Any) -> Any:
    several = st.lists(inner, max_size=3)
    tags = st.fixed_dictionaries({"begin": WORDS, "content": inner, "end": WORDS | st.lists(WORDS)})
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    return st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["or", "sequence"]), "elements": several}),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["optional", "star", "plus", "repeat"]), "content": inner},
            optional={"min": st.integers(-1, 3), "max": st.integers(-1, 3)},
        ),
        tags.map(lambda each: {"type": "tag", **each}),
        st.fixed_dictionaries(
            {
                "type": st.sampled_from(["triggered_tags", "tags_with_separator"]),
                "tags": st.lists(tags, max_size=3),
                "triggers": st.lists(WORDS, max_size=2),
                "separator": WORDS,
            },
            optional={**flags, "excludes": st.lists(WORDS, max_size=2)},
        ),
    )


@given(layout=st.recursive(SIMPLE, _around, max_leaves=6))
@settings(max_examples=150, deadline=None)
def test_any_format_is_a_grammar_or_is_refused(layout: Any) -> None:
    try:
        rules = grammar_spec(layout)
    except Refused as error:
        assert (error.failure.status, error.failure.field) == (400, FIELD)
        assert len(error.failure.message) < 600
    else:
        model().matcher(rules.grammar)
