"""Structures that an answer must have, from the fields of several servers' APIs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, cast

from pydantic import PlainValidator, WithJsonSchema

from common.messages.tokenize import Structure, StructureKind
from services.router.errors import bad_field, shown, unsupported
from services.router.json_body import dump
from services.router.json_schema import (
    BOOLEAN,
    NOT_EMPTY,
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    constant,
    either,
    nullable,
    optional,
    partial,
    record,
)
from services.router.request_fields import check_type, object_at, text_at
from services.router.request_model import OpenAIModel

MAX_STRUCTURE_BYTES = 128 << 10  # one of 100 KB takes seconds to compile; compute has limits, too
MAX_CHOICES = 1024
SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SWITCHES = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")

_SCHEMA = either(OBJECT, {"type": "string", "contentMediaType": "application/json"})
_NAMED_SCHEMA = partial(
    name={"type": "string", "pattern": f"^{SCHEMA_NAME.pattern}$"},
    description=optional(nullable(STRING)),
    schema=_SCHEMA,
    strict=optional(nullable(BOOLEAN)),
)
_TAG = either(partial(format=_SCHEMA), partial(format=optional(NULL), structures=array(OBJECT)))
_RESPONSE_FORMAT = either(
    partial(type=constant("text")),
    partial(type=constant("json_object"), schema=optional(nullable(_SCHEMA))),
    partial(type=constant("json_schema"), json_schema=_NAMED_SCHEMA),
    {**_TAG, **partial(type=constant("structural_tag"))},
)
_STRUCTURES: dict[str, Schema] = {
    "json": _SCHEMA,
    "regex": NOT_EMPTY,
    "choice": array(NOT_EMPTY, minItems=1, maxItems=MAX_CHOICES),
    "grammar": NOT_EMPTY,
    "json_object": {"const": True},
    "structural_tag": either(_TAG, {"type": "string", "contentMediaType": "application/json"}),
}
_NOT_GIVEN = optional({"enum": [None, False]})
_OPTIONS = {
    **dict.fromkeys(_STRUCTURES, _NOT_GIVEN),
    "disable_fallback": optional(nullable(BOOLEAN)),
    "disable_any_whitespace": optional(nullable(BOOLEAN)),
    "disable_additional_properties": _NOT_GIVEN,
    "whitespace_pattern": optional(NULL),
}
_STRUCTURED = either(
    *(record(**{**_OPTIONS, name: schema}) for name, schema in _STRUCTURES.items())
)
_KINDS = tuple(_STRUCTURES)


def read_response_format(value: Any, field: str = "response_format") -> Structure | None:
    """Read a `response_format` of a chat request; ApiError 400."""
    kind = object_at(value, field).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is not None:  # as llama.cpp's clients send it
            return schema_structure(value["schema"], f"{field}.schema")
        return Structure("json_object", "", field)
    if kind == "json_schema":
        return named_schema(value.get("json_schema"), f"{field}.json_schema")
    if kind == "structural_tag":
        return _structural_tag(value, field)
    kinds = "text, json_object, json_schema or structural_tag"
    raise bad_field(f"{field}.type", f"should be {kinds} (it is {shown(kind)})")


def named_schema(value: Any, field: str) -> Structure:
    """Read a schema with its name and description.

    It is always enforced; with `strict` a keyword that no grammar enforces is an error.
    """
    name = object_at(value, field).get("name")
    if not isinstance(name, str) or not SCHEMA_NAME.fullmatch(name):
        raise bad_field(
            f"{field}.name",
            f"should have 1 to 64 letters, digits, underscores or hyphens (it is {shown(name)})",
        )
    check_type(value.get("strict"), bool | None, f"{field}.strict", "true or false")
    check_type(value.get("description"), str | None, f"{field}.description", "a string")
    if value.get("schema") is None:
        raise bad_field(f"{field}.schema", "is required", "missing_required_parameter")
    structure = schema_structure(value["schema"], f"{field}.schema")
    return replace(structure, strict=bool(value.get("strict")))


def schema_structure(schema: Any, field: str) -> Structure:
    """Make the structure of a JSON schema, an object or the text of one; ApiError 400."""
    return _packed("json_schema", _object(schema, field, "a JSON schema object"), field)


def _object(value: Any, field: str, what: str) -> dict[str, Any]:
    """Read an object, or the text of one."""
    if isinstance(value, str):
        _check_size(value.encode("utf-8", "surrogatepass"), field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_field(field, "is text that is not valid JSON") from None
    check_type(value, dict, field, what)
    return cast(dict[str, Any], value)


def _packed(kind: StructureKind, value: Any, field: str) -> Structure:
    try:
        packed = dump(value)
    except (ValueError, RecursionError):
        raise bad_field(field, "cannot be written as JSON again") from None
    _check_size(packed, field)
    return Structure(kind, packed.decode(), field)


def _structural_tag(value: dict[str, Any], field: str) -> Structure:
    """Read a structural tag: xgrammar's form with a `format`, or its older form."""
    if value.get("format") is not None:
        where = f"{field}.format"
        return _packed("structural_tag", _object(value["format"], where, "an object"), where)
    structures, triggers = value.get("structures"), value.get("triggers")
    if structures is None and triggers is None:
        raise bad_field(f"{field}.format", "is required", "missing_required_parameter")
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise bad_field(f"{field}.structures", f"should be objects (it is {shown(structures)})")
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema")},
            "end": each.get("end"),
        }
        for each in structures
    ]
    layout = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    once = {"at_least_one": True} if value.get("at_least_one") is True else {}
    return _packed("structural_tag", {**layout, **once}, f"{field}.structures")


def _structured_outputs(value: Any) -> Structure | None:
    field = "structured_outputs"
    for name, each in object_at(value, field).items():
        _check_option(name, each, field)
    given = [name for name in _KINDS if value.get(name) not in (None, False)]
    if len(given) != 1:
        number = f"it has {' and '.join(given)}" if given else "it has none"
        raise bad_field(field, f"should have one of {', '.join(_KINDS)} ({number})")
    (kind,) = given
    structure = _structured_output(kind, value[kind], f"{field}.{kind}")
    return replace(structure, compact=value.get("disable_any_whitespace") is True)


def _structured_output(kind: str, value: Any, where: str) -> Structure:
    if kind == "json":
        return schema_structure(value, where)
    if kind == "choice":
        return _choice(value, where)
    if kind == "json_object":
        if value is not True:
            raise bad_field(where, f"should be true or false (it is {shown(value)})")
        return Structure("json_object", "", where)
    if kind == "structural_tag":
        return _structural_tag(_object(value, where, "a structural tag"), where)
    return _text("regex" if kind == "regex" else "grammar", value, where)


def _check_option(name: str, value: Any, field: str) -> None:
    """Refuse unknown options, and those that are not supported but would change the structure."""
    if name in _KINDS or value is None:
        return
    if name in _SWITCHES and isinstance(value, bool):
        if value and name == "disable_additional_properties":
            raise unsupported(f"{field}.{name}", 'say "additionalProperties": false in the schema')
        return
    if name in (*_SWITCHES, "whitespace_pattern"):
        raise unsupported(f"{field}.{name}")
    raise bad_field(f"{field}.{shown(name)[1:-1]}", f"is unknown; there are {', '.join(_KINDS)}")


def _choice(value: Any, field: str) -> Structure:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise bad_field(field, f"should be an array of 1 to {MAX_CHOICES} strings")
    for at, each in enumerate(value):
        text_at(each, f"{field}[{at}]")
    return _packed("choice", list(dict.fromkeys(value)), field)


def _text(kind: StructureKind, value: Any, field: str) -> Structure:
    _check_size(text_at(value, field).encode("utf-8", "surrogatepass"), field)
    return Structure(kind, value, field)


def _check_size(packed: bytes, field: str) -> None:
    if len(packed) > MAX_STRUCTURE_BYTES:
        most = f"may have {MAX_STRUCTURE_BYTES} bytes at most"
        raise bad_field(field, f"{most} (it has {len(packed)})")


def _reader(read: Callable[[Any], Structure | None]) -> PlainValidator:
    return PlainValidator(lambda value: None if value is None else read(value))


class StructureFields(OpenAIModel):
    """The fields with which clients request a structure."""

    response_format: Annotated[
        Structure | None,
        _reader(read_response_format),
        WithJsonSchema(nullable(_RESPONSE_FORMAT)),
    ] = None
    """JSON, a JSON schema or tags that [the answer must match](structured.md)"""
    structured_outputs: Annotated[
        Structure | None,
        _reader(_structured_outputs),
        WithJsonSchema(nullable(_STRUCTURED)),
    ] = None
    """what [the answer must match](structured.md), in vLLM's form"""
    json_schema: Annotated[  # SGLang's, as are the others below
        Structure | None,
        _reader(lambda value: schema_structure(value, "json_schema")),
        WithJsonSchema(nullable(_SCHEMA)),
    ] = None
    """a JSON schema that the answer must match"""
    regex: Annotated[
        Structure | None,
        _reader(lambda value: _text("regex", value, "regex")),
        WithJsonSchema(nullable(NOT_EMPTY)),
    ] = None
    """a regular expression that the whole answer must match"""
    ebnf: Annotated[
        Structure | None,
        _reader(lambda value: _text("grammar", value, "ebnf")),
        WithJsonSchema(nullable(NOT_EMPTY)),
    ] = None
    """a grammar in GBNF or Lark that the answer must match"""

    @property
    def structure(self) -> Structure | None:
        """The one structure of the request; ApiError 400 if there are two."""
        names = ("response_format", "structured_outputs", "json_schema", "regex", "ebnf")
        given = [name for name in names if getattr(self, name) is not None]
        structures: list[Structure] = [getattr(self, name) for name in given]
        if len(given) > 1:
            raise bad_field(given[1], f"cannot be used together with {structures[0].field}")
        return structures[0] if structures else None
