"""The keywords of JSON Schema that no grammar enforces.

llguidance refuses them, or ignores them in its lenient mode.
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
# Without their keyword they have no effect; llguidance refuses them nevertheless.
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
    """Whether an unenforced keyword of a schema allows everything."""
    if keyword in ATTENDANTS:
        return ATTENDANTS[keyword] not in schema
    return keyword in _NO_DEMAND and schema[keyword] is _NO_DEMAND[keyword]


def unheld_keywords(schema: Any) -> Iterator[str]:
    """Yield the places of keywords that no grammar enforces, such as `.properties.a.not`.

    `oneOf` is enforced, as `anyOf`, if no two of its branches have a type in common.
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
    """Whether all schemas name their types, and no two have one in common."""
    types = [_types(branch) for branch in branches]
    return all(one and other and not one & other for one, other in combinations(types, 2))


def _types(schema: Any) -> frozenset[str]:
    value = schema.get("type") if isinstance(schema, dict) else None
    names = value if isinstance(value, list) else [value]
    return frozenset("number" if name == "integer" else str(name) for name in names if name)
