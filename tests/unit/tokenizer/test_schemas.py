"""Clients' schemas lose what says nothing of what is valid, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from services.tokenizer.schemas import CALENDAR_PATTERNS, closed, prepared


def without_options(schema: Any) -> Any:
    cleaned = dict(prepared(schema))
    assert set(cleaned.pop("x-guidance")) == {"whitespace_pattern", "lenient"}
    return cleaned


def test_remarks_are_left_out() -> None:
    schema = {
        "title": "Person",
        "description": "long " * 100,
        "type": "object",
        "properties": {"a": {"type": "string", "default": "x", "examples": ["y"], "format": "hex"}},
        "x-guidance": {"lenient": True},
    }
    assert without_options(schema) == {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize("kind", ["properties", "patternProperties", "$defs", "definitions"])
def test_names_of_properties_are_no_keywords(kind: str) -> None:
    names = ("description", "title", "default", "format", "x-guidance", "enum", "const")
    schema = {kind: {name: {"type": "string", "title": name} for name in names}}
    assert without_options(schema) == {kind: {name: {"type": "string"} for name in names}}


def test_values_stay_as_they_are() -> None:
    values = {"const": {"title": "x", "format": "hex"}, "enum": [{"description": "y"}]}
    schema = {"anyOf": [values, {"items": {"not": values}}]}
    assert without_options(schema) == schema


def test_known_formats_are_kept() -> None:
    assert without_options({"type": "string", "format": "uuid"})["format"] == "uuid"


def test_dates_are_patterns_beside_those_of_the_client() -> None:
    cleaned = without_options({"format": "date", "pattern": "^20", "allOf": [{"minLength": 1}]})
    assert cleaned["pattern"] == "^20" and "format" not in cleaned
    assert cleaned["allOf"] == [{"minLength": 1}, {"pattern": CALENDAR_PATTERNS["date"]}]


def test_the_clients_schema_is_not_changed() -> None:
    schema = {"title": "x", "properties": {"a": {"title": "y"}}}
    before = repr(schema)
    prepared(schema)
    closed(schema)
    assert repr(schema) == before


def test_what_a_plain_object_does_not_name_is_left_out() -> None:
    plain = {"properties": {"a": {}}}
    assert closed(plain)["additionalProperties"] is False
    for schema in (
        {"type": "object"},
        {**plain, "additionalProperties": {"type": "string"}},
        {**plain, "additionalProperties": True},
        {**plain, "anyOf": [{"required": ["b"]}]},
        {**plain, "patternProperties": {"^x": {}}},
    ):
        assert closed(schema) == schema
