"""Pieces of JSON Schema."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}
ANY: Schema = {}


def ref(name: str) -> Schema:
    """Refer to a schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object with these properties and no others, all there but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def partial(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object with these properties, which may have others, too."""
    schema = record(properties, optional)
    del schema["additionalProperties"]
    return schema


def array(items: Schema, **bounds: int) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **bounds}


def constant(value: str) -> Schema:
    """One text."""
    return {"const": value}


def one_of(*values: str) -> Schema:
    """One of several texts."""
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    """Any of several schemas."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return either(schema, NULL)
