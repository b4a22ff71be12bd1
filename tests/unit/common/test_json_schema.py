"""What no grammar holds is what llguidance says it cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from common.json_schema import ATTENDANTS, UNHELD, unheld_keywords

KEYWORDS: dict[str, Any] = {
    "$anchor": "a",
    "$comment": "a",
    "$dynamicAnchor": "a",
    "$dynamicRef": "#a",
    "$id": "a",
    "$recursiveAnchor": True,
    "$recursiveRef": "#",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$vocabulary": {},
    "additionalItems": False,
    "additionalProperties": False,
    "allOf": [{"type": "object"}],
    "anyOf": [{"type": "object"}],
    "const": 1,
    "contains": {},
    "contentEncoding": "base64",
    "contentMediaType": "text/plain",
    "contentSchema": {},
    "default": 1,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "deprecated": True,
    "description": "a",
    "enum": [1],
    "examples": [1],
    "exclusiveMaximum": 3,
    "exclusiveMinimum": 1,
    "format": "uuid",
    "if": {},
    "items": {"type": "string"},
    "maxItems": 3,
    "maxLength": 3,
    "maxProperties": 3,
    "maximum": 3,
    "minItems": 1,
    "minLength": 1,
    "minProperties": 1,
    "minimum": 1,
    "multipleOf": 2,
    "not": {},
    "nullable": True,
    "oneOf": [{"type": "string"}, {"type": "integer"}],
    "pattern": "a",
    "patternProperties": {"a": {"type": "string"}},
    "prefixItems": [{"type": "string"}],
    "properties": {"a": {"type": "string"}},
    "propertyNames": {},
    "readOnly": True,
    "required": ["a"],
    "title": "a",
    "type": "object",
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
    "writeOnly": True,
}


def is_held(schema: dict[str, Any]) -> bool:
    """Whether llguidance makes a grammar of all of it."""
    grammar = f"start: %json {json.dumps(schema)}"
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not is_error


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_held_exactly_if_llguidance_holds_it(keyword: str) -> None:
    schema = {keyword: KEYWORDS[keyword]}
    assert (list(unheld_keywords(schema)) == []) is is_held(schema)


def test_every_unheld_keyword_is_among_those_that_were_tried() -> None:
    assert UNHELD < set(KEYWORDS)
    assert all(not is_held({name: 1}) for name in ATTENDANTS)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (True, []),
        ({"properties": {"not": {"type": "string"}}}, []),
        ({"enum": [{"not": 1}], "const": {"if": 1}, "default": {"not": {}}}, []),
        ({"uniqueItems": False, "unevaluatedProperties": True, "then": {}, "minContains": 1}, []),
        ({"properties": {"a": {"items": {"not": {}}}}}, [".properties.a.items.not"]),
        ({"prefixItems": [{}, {"contains": {}, "maxContains": 1}]}, [".prefixItems[1].contains"]),
        ({"if": {}, "then": {"not": {}}, "else": {}}, [".if"]),
        ({"$defs": {"x" * 100: {"uniqueItems": True}}}, [f".$defs.{'x' * 64}.uniqueItems"]),
        (
            {"additionalProperties": {"dependentRequired": {}}},
            [".additionalProperties.dependentRequired"],
        ),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [".oneOf"]),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}]}, []),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, [".oneOf"]),
    ],
)
def test_where_the_unheld_keywords_of_a_schema_are(schema: Any, found: list[str]) -> None:
    assert list(unheld_keywords(schema)) == found


def test_a_schema_may_be_deep() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(10_000):
        schema = {"items": schema}
    assert len(list(unheld_keywords(schema))) == 1
