"""Structures of an answer: what may be written, and that what ends is what was asked for."""

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
from common.messages.tokenize import OutputRules, Structure, StructureKind, ToolUse
from services.tokenizer.answer_grammar import compose
from services.tokenizer.jobs import Refused, TemplateFormat
from tests.cases import num_cases
from tests.unit.tokenizer.schema_strategies import LEAVES, SCHEMAS, objects
from tests.unit.tokenizer.walks import model
from tests.unit.tokenizer.written_calls import FORMATS, NOW, TOOLS, WEATHER

FIELD = "response_format.json_schema.schema"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def grammar_spec(
    kind: StructureKind, text: Any, speech: TemplateFormat | None = None
) -> GrammarSpec:
    source = text if isinstance(text, str) else json.dumps(text)
    rules = OutputRules(structure=Structure(kind, source, FIELD))
    composed = compose(rules, [], speech or TemplateFormat(), model().vocabulary)
    assert composed is not None and composed.field == FIELD
    return composed


def test_a_json_object_is_any_object() -> None:
    rules = grammar_spec("json_object", "")
    for right in ("{}", '{"a": [1, {"b": null}], "c": "é"}'):
        assert model().takes(rules, right)
    for wrong in ("[1]", "1", "", '{"a": }', "{} {}", "here: {}"):
        assert not model().takes(rules, wrong)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name":"Ada","age":36}',
        '{\n  "name": "Ada",\n  "age": 36\n}',
        '{\r\n\t"name": "Ada",\r\n\t"age": 36\r\n}',
        '{ "name" : "Ada", "age" : 36 }',
    ],
)
def test_json_is_written_as_models_do(text: str) -> None:
    assert model().takes(grammar_spec("json_schema", PERSON), text)


@pytest.mark.parametrize(
    "text",
    [
        '{  "name": "Ada", "age": 36}',
        '{"name":  "Ada", "age": 36}',
        '{\n\n"name": "Ada", "age": 36}',
        '{"name": "Ada",\n' + 30 * " " + '"age": 36}',
        '{"name": "Ada", "age": 36}\n',
        ' {"name": "Ada", "age": 36}',
    ],
)
def test_json_cannot_run_away_in_whitespace(text: str) -> None:
    assert not model().takes(grammar_spec("json_schema", PERSON), text)


def test_compact_json_leaves_no_whitespace_to_choose() -> None:
    for kind, schema in (("json_schema", json.dumps(PERSON)), ("json_object", "")):
        structure = Structure("json_schema" if schema else "json_object", schema, FIELD, True)
        rules = compose(OutputRules(structure), [], TemplateFormat(), model().vocabulary)
        assert model().takes(rules, '{"name": "Ada", "age": 36}'), kind
        for wrong in ('{"name":"Ada","age":36}', '{ "name": "Ada", "age": 36}', '{\n"name": "A"}'):
            assert not model().takes(rules, wrong), (kind, wrong)


def test_a_client_cannot_change_how_whitespace_is_bounded() -> None:
    options = {"whitespace_pattern": "[ ]*", "lenient": True}
    schema = {**PERSON, "x-guidance": options, "$defs": {"x": {"x-guidance": options}}}
    assert not model().takes(grammar_spec("json_schema", schema), '{   "name": "Ada", "age": 36}')


def test_formats_are_remarks_unless_they_can_be_enforced() -> None:
    fields = {"a": {"type": "string", "format": "int64"}, "b": {"type": "string", "format": "date"}}
    schema = {"type": "object", "properties": {**fields, "format": {"type": "string"}}}
    rules = grammar_spec("json_schema", {**schema, "required": ["a", "b", "format"]})
    assert model().takes(rules, '{"a": "x", "b": "2026-01-31", "format": "y"}')
    assert not model().takes(rules, '{"a": "x", "b": "soon", "format": "y"}')
    rules = grammar_spec("json_schema", {"enum": [{"format": "int64"}]})
    assert model().takes(rules, '{"format": "int64"}')


@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({"not": {"required": ["name"]}}, '{"name": "Ada", "age": 36}'),
        ({"if": {}, "then": {"required": ["x"]}}, '{"name": "Ada", "age": 36}'),
        ({"dependentRequired": {"name": ["x"]}}, '{"name": "Ada", "age": 36}'),
        ({"oneOf": [{"required": ["name"]}, {"required": ["age"]}]}, '{"name": "Ada", "age": 36}'),
    ],
)
def test_what_no_grammar_holds_is_passed_over_and_the_rest_is_held(
    more: dict[str, Any], right: str
) -> None:
    rules = grammar_spec("json_schema", {**PERSON, **more})
    assert model().takes(rules, right)
    assert not model().takes(rules, '{"name": 5, "age": 36}')


def test_a_strict_schema_may_have_keywords_that_demand_nothing() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "then": {}}
    structure = Structure("json_schema", json.dumps(schema), FIELD, strict=True)
    rules = compose(OutputRules(structure=structure), [], TemplateFormat(), model().vocabulary)
    assert rules is not None
    assert model().takes(rules, "[1, 1]")
    assert not model().takes(rules, '["a"]')


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_may_allow_anything(schema: Any) -> None:
    for text in ("1", '"x"', "[null]", "{}"):
        assert model().takes(grammar_spec("json_schema", schema), text)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\d{3}-\d{4}", ["555-1234"], ["555-123", "x555-1234"]),
        (r"\d+\D", ["12x", "1é"], ["٣x"]),
        (r"^ab?$|^c$", ["a", "ab", "c"], ["d", "abc", ""]),
        ("https?://[a-z]+/", ["http://a/", "https://bc/"], ["ftp://a/"]),
        ("a\nb|(?i)yes", ["a\nb", "YES"], ["ab"]),
        ("[ä-ü]+", ["äöü"], ["a"]),
        ("", [""], ["a"]),
    ],
)
def test_a_regex_is_matched_whole(pattern: str, right: list[str], wrong: list[str]) -> None:
    rules = grammar_spec("regex", pattern)
    assert [text for text in right if not model().takes(rules, text)] == []
    assert [text for text in wrong if model().takes(rules, text)] == []


def test_a_choice_is_one_of_the_texts() -> None:
    choices = ["yes", "yes please", 'n"o"\n', "größer", "\\d"]
    rules = grammar_spec("choice", choices)
    assert all(model().takes(rules, choice) for choice in choices)
    assert not any(model().takes(rules, text) for text in ("ye", "no", "1", "yes yes please"))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" (" " digit)+\ndigit: /[0-9]/',
        'root ::= "a" (" " digit)+\ndigit ::= [0-9]',
        '# a comment\nsum ::= "a" (" " digit)+\ndigit ::= [0-9]',
        'start ::= "a" (" " digit)+\ndigit ::= [0-9]',
    ],
)
def test_a_grammar_is_lark_or_gbnf(grammar: str) -> None:
    rules = grammar_spec("grammar", grammar)
    assert model().takes(rules, "a 1 2")
    assert not model().takes(rules, "a")
    thoughtful = grammar_spec("grammar", grammar, TemplateFormat("", "think", "inside"))
    assert model().takes(thoughtful, "so</think>\n\na 1 2")
    assert not model().takes(thoughtful, "a 1 2")


def test_the_rules_of_a_clients_grammar_are_its_own() -> None:
    grammar = 'start: thoughts structure\nthoughts: "x"\nstructure: "y"\n%ignore " "'
    rules = grammar_spec("grammar", grammar, TemplateFormat("", "think", "inside"))
    assert model().takes(rules, "so x y</think>x y")
    assert not model().takes(rules, "so</think>y")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '"object"'),
        ("grammar", 'root ::= "a'),
        ("grammar", "root ::= missing"),
    ],
)
def test_what_is_no_structure_is_refused_by_field(kind: StructureKind, text: str) -> None:
    with pytest.raises(Refused) as caught:
        grammar_spec(kind, text)
    failure = caught.value.failure
    assert (failure.status, failure.field) == (400, FIELD)


@given(schema=objects(SCHEMAS) | LEAVES, seed=st.integers(0, 2**32), num_free=st.integers(0, 60))
@settings(max_examples=num_cases(100, exploring=200))
def test_whatever_obeys_the_masks_and_ends_validates(schema: Any, seed: int, num_free: int) -> None:
    text = model().walk(grammar_spec("json_schema", schema), Random(seed), num_free)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@given(
    pattern=st.sampled_from(
        [r"[a-z]{2,5}(-\d+)?", r"(yes|no)[.!]{0,3}", r"[a-zé]+@[\da-z]+\.(com|org)"]
    ),
    seed=st.integers(0, 2**32),
    num_free=st.integers(0, 20),
)
@settings(deadline=None)
def test_whatever_obeys_a_regex_and_ends_matches(pattern: str, seed: int, num_free: int) -> None:
    text = model().walk(grammar_spec("regex", pattern), Random(seed), num_free)
    assert text is None or re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", FORMATS)
def test_with_tools_an_answer_is_a_call_or_the_structure(name: str) -> None:
    tool_format, template, written = FORMATS[name]
    for choice in ("auto", "required"):
        rules = compose(
            OutputRules(
                structure=Structure("json_schema", json.dumps(PERSON), FIELD),
                tools=ToolUse("auto" if choice == "auto" else "required"),
            ),
            TOOLS,
            TemplateFormat(tool_format, template=template),
            model().vocabulary,
        )
        assert rules is not None
        assert model().takes(rules, written([("get_weather", {"city": "Oslo"})]))
        assert model().takes(rules, '{"name": "Ada", "age": 36}') == (choice == "auto")
        assert not model().takes(rules, '{"name": "Ada"}')
        assert rules.field == (FIELD if choice == "auto" else "tools")


def test_tools_without_a_format_leave_the_structure() -> None:
    rules = compose(
        OutputRules(structure=Structure("choice", '["a"]', FIELD), tools=ToolUse("auto")),
        TOOLS,
        TemplateFormat(),
        model().vocabulary,
    )
    assert model().takes(rules, "a")


def test_tools_alone_leave_the_text_free() -> None:
    rules = OutputRules(tools=ToolUse("auto"))
    assert compose(rules, [WEATHER, NOW], TemplateFormat("hermes"), model().vocabulary) is None


def test_ids_and_words_need_no_grammar() -> None:
    rules = OutputRules(allowed_token_ids=(3, 4), bad_words=("dog",))
    banned = model().vocabulary.bad_word_sequences(["dog"])
    composed = compose(rules, [], TemplateFormat(), model().vocabulary)
    assert banned and composed is not None
    assert composed == GrammarSpec("", (3, 4), banned, composed.field)
