"""Adapts clients' JSON schemas to llguidance without changing what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.json_schema import demands_nothing

# Whitespace where JSON allows it: one blank, or a line break with an indent, as models write it.
# Without a bound, a model at high temperature can fill its answer with blanks.
_WHITESPACE = r" |\r?\n[ \t]{0,20}"
# The formats that llguidance enforces, without those of dates. JSON Schema lets a validator ignore
# a format, so others are left out.
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
SHARED = ("$defs", "definitions")  # where schemas keep what they refer to
_VALUES = frozenset({"const", "enum"})  # data, not schemas
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Keywords that do not affect validity and can be most of a schema's length. The last is
# llguidance's own: clients do not decide how whitespace is bounded.
REMARKS = frozenset(
    {
        "$comment",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
        "x-guidance",
    }
)
_OPENING = frozenset(
    {"$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf", "patternProperties"}
)

# Dates and times as their readers take them: llguidance's own formats let a year 0000, a 29th of
# February in any year, a second 60 and offsets of a day and more through, which RFC 3339 allows in
# part and Python's `datetime` does not.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # 04 to 96
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAYS_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
_DAY_OF_A_YEAR = (
    f"(?:(?:0[1-9]|1[0-2])-{_DAYS_28}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_A_YEAR}|{_LEAP_YEAR}-02-29)"
_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_MINUTES}:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{_MINUTES})"

CALENDAR_PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
}

# One blank after each comma and colon, as models and Python write JSON on one line.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def prepared(schema: Any, lenient: bool = False, compact: bool = False) -> Any:
    """Return a schema for `%json`; `lenient` ignores the keywords that cannot be enforced.

    With `compact` the JSON stands on one line, and the model chooses no whitespace.
    """
    whitespace = _COMPACT if compact else {"whitespace_pattern": _WHITESPACE}
    options = {**whitespace, "lenient": lenient}
    if schema is True or schema == {}:
        return {"x-guidance": options}
    if not isinstance(schema, dict):
        return schema
    return {**_cleaned(schema), "x-guidance": options}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid the properties that a plain object's schema allows without naming them."""
    if "properties" not in schema or _OPENING & schema.keys():
        return schema
    return {**schema, "additionalProperties": schema.get("additionalProperties", False)}


def moved(schema: Any, at: str) -> Any:
    """Redirect references to the schema's root to its new place; shared parts stay at the top."""
    if isinstance(schema, list):
        return [moved(item, at) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: moved(value, at) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        if not reference.startswith(tuple(f"#/{key}/" for key in SHARED)):
            copy["$ref"] = at + reference[1:]
    return copy


def _cleaned(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key in REMARKS or demands_nothing(schema, key):
            continue
        if key in _MAPS and isinstance(value, dict):  # its keys are names, whatever they are
            cleaned[key] = {name: _cleaned(inner) for name, inner in value.items()}
        elif key in _VALUES:
            cleaned[key] = value
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            cleaned[key] = _cleaned(value)
    pattern = CALENDAR_PATTERNS.get(str(schema.get("format")))
    if pattern is not None and "pattern" in cleaned:
        others = cleaned.get("allOf")
        cleaned["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": pattern}]
    elif pattern is not None:
        cleaned["pattern"] = pattern
    return cleaned
