"""Hypothesis strategies for JSON schemas of tools and structures."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

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
