"""The keywords of JSON Schema that no grammar holds a text to.

They are those that llguidance refuses, or passes over where it is told to be lenient.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

UNHELD: Final = frozenset(
    {
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "not",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
# Without their first they say nothing; llguidance refuses them nevertheless.
ATTENDANTS: Final = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
_NO_DEMAND: Final = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_MAPS: Final = ("$defs", "definitions", "patternProperties", "properties")
_MAX_NAME: Final = 64


def demands_nothing(schema: dict[str, Any], keyword: str) -> bool:
    """Whether an unheld keyword of a schema allows everything."""
    if keyword in ATTENDANTS:
        return ATTENDANTS[keyword] not in schema
    return keyword in _NO_DEMAND and schema[keyword] is _NO_DEMAND[keyword]


def unheld_keywords(schema: Any) -> Iterator[str]:
    """Yield where in a schema keywords are that no grammar holds, such as `.properties.a.not`.

    `oneOf` is one of them unless its branches have types apart: else it is held as `anyOf`.
    """
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        path, here = waiting.pop()
        if not isinstance(here, dict):
            continue
        for keyword, value in here.items():
            where = f"{path}.{keyword}"
            if keyword in UNHELD and not demands_nothing(here, keyword):
                yield where
            elif keyword in _MAPS and isinstance(value, dict):
                named = ((f"{where}.{name[:_MAX_NAME]}", inner) for name, inner in value.items())
                waiting.extend(named)
            elif keyword in ("allOf", "anyOf", "items", "oneOf", "prefixItems") and isinstance(
                value, list
            ):
                waiting.extend((f"{where}[{at}]", inner) for at, inner in enumerate(value))
                if keyword == "oneOf" and not _are_apart(value):
                    yield where
            elif keyword in ("additionalItems", "additionalProperties", "items"):
                waiting.append((where, value))


def _are_apart(branches: list[Any]) -> bool:
    """Whether no two schemas have a type in common, as far as they say so."""
    types = [_types(branch) for branch in branches]
    return all(one and other and not one & other for one, other in combinations(types, 2))


def _types(schema: Any) -> frozenset[str]:
    found = schema.get("type") if isinstance(schema, dict) else None
    names = found if isinstance(found, list) else [found]
    return frozenset("number" if name == "integer" else str(name) for name in names if name)
