"""Pieces of JSON Schema."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

STRING: Schema = {"type": "string"}
NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
ANY: Schema = {}


class _Optional(dict[str, Any]):
    """The schema of a property that an object may lack."""


def optional(schema: Schema) -> Schema:
    """Mark a property that `record` and `partial` do not require."""
    return _Optional(schema)


def record(**properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {**partial(**properties), "additionalProperties": False}


def partial(**properties: Schema) -> Schema:
    """An object with these properties, which may have others, too."""
    required = [name for name, value in properties.items() if not isinstance(value, _Optional)]
    return {"type": "object", "properties": properties, "required": required}


def each(schema: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, schema)


def ref(name: str) -> Schema:
    """Refer to a schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def mapping(values: Schema) -> Schema:
    """An object with any properties, whose values have one schema."""
    return {"type": "object", "additionalProperties": values}


def constant(value: str) -> Schema:
    return {"const": value}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return either(schema, NULL)
