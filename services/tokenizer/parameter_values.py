"""Which values a tool's parameters may have, where a format writes texts without quotes.

A schema is taken apart into texts, which are written as they are, and JSON of the other types. What
this cannot do exactly is written as JSON with its strings in quotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.parameter_kinds import (
    ANY,
    ARRAY,
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    PYTHON_WORDS,
    QUOTED,
    TEXT,
    Kinds,
    kind_of,
)
from services.tokenizer.functions import Function
from services.tokenizer.schemas import CALENDAR_PATTERNS, FORMATS, REMARKS, SHARED

_MAX_DEPTH = 8
_MAX_TEXT = 1000  # the longest bound of a text; an automaton has as many states
_KINDS = {
    "string": TEXT,
    "null": NULL,
    "boolean": BOOLEAN,
    "integer": INTEGER,
    "number": INTEGER + NUMBER,
    "array": ARRAY,
    "object": OBJECT,
}
_ENFORCED = FORMATS | CALENDAR_PATTERNS.keys()  # formats that a grammar of JSON holds
_WAYS = frozenset({"$ref", "anyOf", "oneOf"})
_COMBINED = frozenset({"allOf", "dependentSchemas", "else", "if", "not", "then"})


@dataclass(frozen=True, slots=True)
class Text:
    """A text of so many characters, or one of `choices` if there are any."""

    choices: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A value: any of the texts, or JSON by any of the schemas; `kinds` say how to read it."""

    kinds: str
    texts: tuple[Text, ...]
    schemas: tuple[Any, ...]


class _NotPlain(Exception):
    """A schema whose strings cannot be written without quotes."""


def kinds_by_function(functions: Iterable[Function]) -> Kinds:
    return {
        function.name: {name: value.kinds for name, value in values_of(function).items()}
        for function in functions
    }


def values_of(function: Function) -> dict[str, Value]:
    """Return the values of a function's parameters, those that are only required last."""
    parameters = function.parameters
    properties, required = parameters.get("properties"), parameters.get("required")
    named = properties if isinstance(properties, dict) else {}
    wanted = sorted(map(str, required)) if isinstance(required, list) else []
    if function.input_lark:  # its grammar is one of the inside of quotes
        return {"input": Value(QUOTED, (), ())}
    return {name: value_of(named.get(name, {}), parameters) for name in (*named, *wanted)}


def value_of(schema: Any, root: Any) -> Value:
    """Take a parameter's schema apart; references in it are into `root`."""
    kinds = _kinds(schema, root, 0)
    if TEXT not in kinds:
        return Value(kinds or ANY, (), (schema,))
    try:
        parts = list(_parts(schema, root, 0))
    except _NotPlain:
        return Value(kinds.replace(TEXT, QUOTED), (), (schema,))
    texts = tuple(part for part in parts if isinstance(part, Text))
    schemas = tuple(part for part in parts if not isinstance(part, Text))
    read = {kind for part in schemas for kind in _kinds(part, root, 0)}
    # A text that would be read as JSON has to be one of the schemas' values then.
    if any(_read_as(choice) in read for text in texts for choice in text.choices):
        return Value(kinds.replace(TEXT, QUOTED), (), (schema,))
    return Value(kinds, texts, schemas)


def _read_as(text: str) -> str:
    """Return the kind of the JSON that a text is, if it is any."""
    try:
        return kind_of(json.loads(PYTHON_WORDS.get(text, text)))
    except (ValueError, RecursionError):
        return ""


def _resolved(reference: Any, root: Any) -> Any:
    """Return the schema that a local reference leads to; if to none, one that allows all."""
    found = root
    for step in str(reference).split("/")[1:]:
        if not isinstance(found, dict):
            return {}
        found = found.get(step.replace("~1", "/").replace("~0", "~"), {})
    return found


def _kinds(schema: Any, root: Any, depth: int) -> str:
    """Return every kind that a schema may allow."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY
    bounds = [set(ANY)]
    if "$ref" in schema:
        bounds.append(set(_kinds(_resolved(schema["$ref"], root), root, depth + 1)))
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        bounds.append({kind for one in types for kind in _KINDS.get(str(one), "")})
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        bounds.append({TEXT if isinstance(value, str) else kind_of(value) for value in values})
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            ways = (_kinds(way, root, depth + 1) for way in schema[key])
            bounds.append({kind for way in ways for kind in way})
    allowed = set.intersection(*bounds)
    return "".join(kind for kind in ANY if kind in allowed)


def _parts(schema: Any, root: Any, depth: int) -> Iterator[Any]:
    """Yield a schema's texts, and schemas of one type each for its other values."""
    schema = schema if isinstance(schema, dict) else {}
    rules = schema.keys() - REMARKS - set(SHARED)
    if depth > _MAX_DEPTH or rules & _COMBINED:
        raise _NotPlain
    if rules & _WAYS:
        for way in _ways(schema, rules, root):
            yield from _parts(way, root, depth + 1)
    elif rules & {"const", "enum"}:
        yield from _choices(schema, rules)
    else:
        yield from _typed(schema, rules)


def _ways(schema: dict[str, Any], rules: set[str], root: Any) -> list[Any]:
    """Return the schemas of which one has to hold, if there is no other rule."""
    rule, *others = rules
    ways = [_resolved(schema[rule], root)] if rule == "$ref" else schema[rule]
    if others or not isinstance(ways, list):
        raise _NotPlain
    return ways


def _typed(schema: dict[str, Any], rules: set[str]) -> Iterator[Any]:
    given = schema.get("type", list(_KINDS))
    types = given if isinstance(given, list) else [given]
    if "string" in types:
        if "pattern" in rules or str(schema.get("format")) in _ENFORCED:
            raise _NotPlain
        yield _text(schema)
    if set(types) >= {"integer", "number"}:
        types = [one for one in types if one != "integer"]
    yield from ({**schema, "type": one} for one in types if one != "string")


def _choices(schema: dict[str, Any], rules: set[str]) -> Iterator[Any]:
    values = [schema["const"]] if "const" in rules else schema["enum"]
    if len(rules - {"type"}) > 1 or not isinstance(values, list):
        raise _NotPlain
    texts = tuple(value for value in values if isinstance(value, str))
    if texts:
        yield Text(texts)
    yield from ({"const": value} for value in values if not isinstance(value, str))


def _text(schema: dict[str, Any]) -> Text:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if type(least) is not int or not 0 <= least <= _MAX_TEXT:
        raise _NotPlain
    if most is not None and (type(most) is not int or not least <= most <= _MAX_TEXT):
        raise _NotPlain
    return Text((), least, most)
