"""Llama 3.1 to 3.3, and Llama 4 by its own template: a bare JSON object, maybe after a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, json_rule, literal, one_of, separated
from services.tokenizer.schemas import closed, prepared
from services.tokenizer.tool_grammars.protocol import Dialect, call_object

_SHARED = ("$defs", "definitions")


def calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """`{"name": …, "parameters": {…}}`, with `; ` between several.

    The whole call is one schema, not text around the arguments' one: where an answer may also be
    JSON of another schema, llguidance follows both only if both are schemas.
    """
    markers = dialect.markers
    bodies = [
        call_object(number, function, markers.arguments_key)
        if function.input_lark
        else Fragment(f"call_{number}", (json_rule(f"call_{number}", _schema(function, markers)),))
        for number, function in enumerate(functions)
    ]
    many = separated(one_of(bodies), literal(f"{markers.separator} "), max_calls)
    token_id = dialect.vocabulary.token_of(markers.begin)
    if token_id is None:
        return many
    return in_order(Fragment(f"({dialect.vocabulary.marker(markers.begin)})?"), many)


def _schema(function: Function, markers: Any) -> Any:
    inner = closed(function.parameters)
    shared = {key: inner[key] for key in _SHARED if key in inner}
    rest = {key: value for key, value in inner.items() if key not in _SHARED}
    at = f"#/properties/{markers.arguments_key}"
    schema = {
        **{key: _moved(value, at) for key, value in shared.items()},
        "type": "object",
        "properties": {
            markers.name_key: {"const": function.name},
            markers.arguments_key: _moved(rest, at),
        },
        "required": [markers.name_key, markers.arguments_key],
        "additionalProperties": False,
    }
    return prepared(schema, lenient=not function.strict)


def _moved(schema: Any, at: str) -> Any:
    """Point references to the schema's root to where it stands now; shared parts stay on top."""
    if isinstance(schema, list):
        return [_moved(item, at) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, at) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        if not reference.startswith(tuple(f"#/{key}/" for key in _SHARED)):
            moved["$ref"] = at + reference[1:]
    return moved
