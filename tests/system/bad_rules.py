"""Structures and tools that cannot be had."""

from __future__ import annotations

from typing import Any

from tests.system.bad_conversations import TOOL
from tests.system.bad_requests import (
    INVALID,
    Wrong,
    chat,
    text,
)

NO_GRAMMAR = "invalid_grammar"
WHERE_SCHEMA = "response_format.json_schema.schema"


def schema(
    name: str, value: Any, where: str | None = WHERE_SCHEMA, code: str = NO_GRAMMAR
) -> Wrong:
    """Ask for an answer by this schema."""
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    return chat(f"schema {name}", {"response_format": asked}, where, code)


def asked(name: str, kind: str, value: Any, code: str = NO_GRAMMAR, where: str = "") -> Wrong:
    """Ask for an answer by `structured_outputs`."""
    where = where or f"structured_outputs.{kind}"
    return text(f"{kind} {name}", {"structured_outputs": {kind: value}}, where, code)


def _deep_schema(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"properties": {"a": inner}}
    return inner


UNHELD = {"name": "a", "strict": True, "schema": {"items": {"not": {}}}}
STRUCTURES = [
    chat("a format as text", {"response_format": "json"}, "response_format"),
    chat("a format of no kind", {"response_format": {}}, "response_format.type"),
    chat("an XML format", {"response_format": {"type": "xml"}}, "response_format.type"),
    chat(
        "tags",
        {"response_format": {"type": "structural_tag", "format": {"type": "wibble"}}},
        "response_format.format",
        "invalid_grammar",
    ),
    schema("as text", "{", code=INVALID),
    schema("as an array", [], code=INVALID),
    chat(
        "a strict schema that no grammar holds",
        {"response_format": {"type": "json_schema", "json_schema": UNHELD}},
        "response_format.json_schema.schema.items.not",
        "unsupported_parameter",
    ),
    schema("of an unknown type", {"type": "wibble"}),
    schema("with type 5", {"type": 5}),
    schema("without an end", {"$ref": "#"}),
    schema("in a circle", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    schema("of nothing", {"$ref": "#/$defs/b"}),
    schema("of the web", {"$ref": "http://127.0.0.1:1/schema.json"}),
    schema("of a file", {"$ref": "file:///etc/passwd"}),
    schema("impossible", {"type": "integer", "minimum": 5, "maximum": 3}),
    schema("impossible string", {"type": "string", "minLength": 5, "maxLength": 3}),
    schema("that its compiler dies of", {"const": -(1 << 63)}),
    schema("with an empty enum", {"enum": []}),
    schema("with a bad pattern", {"type": "string", "pattern": "(["}),
    schema("with a huge enum", {"enum": [f"{at}" * 20 for at in range(2000)]}, code=INVALID),
    schema("too deep", _deep_schema(40), None, "invalid_json"),
    schema("too wide", {"properties": {f"p{at}" * 20: {} for at in range(1500)}}, code=INVALID),
    asked("unclosed", "regex", "(a"),
    asked("with a back reference", "regex", r"(a)\1"),
    asked("looking ahead", "regex", "(?=a)b"),
    asked("a large one", "regex", "a" * 200_000, INVALID),
    asked("empty", "regex", "", INVALID),
    asked("none", "choice", [], INVALID),
    asked("of numbers", "choice", [1], INVALID, "structured_outputs.choice[0]"),
    asked("5,000", "choice", ["a"] * 5000, INVALID),
    asked("of nonsense", "grammar", "}{"),
    asked("without a start", "grammar", 'a: "x"'),
    asked("without a rule", "grammar", "start: wibble"),
    asked("in a circle", "grammar", "start: start"),
    asked("left-recursive alone", "grammar", 'start: start "a"'),
    asked("of lexemes in circles", "grammar", "start: A\nA: B\nB: A"),
    asked("with an import", "grammar", '%import "/etc/passwd"\nstart: "a"'),
    asked("GBNF without a rule", "grammar", "root ::= wibble"),
    asked("GBNF in pieces", "grammar", "root ::= (((("),
    asked("too large", "grammar", 'start: "a"\n' + "// x\n" * 40_000, INVALID),
    asked("of no kind", "wibble", 1, INVALID),
    text(
        "two kinds",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        INVALID,
    ),
    text("two structures", {"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    text(
        "a structure and other ids",
        {"regex": "a", "allowed_token_ids": [5]},
        "regex",
        "grammar_failed",
    ),
]


def tools(name: str, found: list[Any], where: str, code: str = INVALID, **more: Any) -> Wrong:
    """Offer these tools."""
    return chat(f"tools {name}", {"tools": found, **more}, where, code)


def function(**changes: Any) -> dict[str, Any]:
    """Make a tool of a function."""
    return {"type": "function", "function": {"name": "f", **changes}}


TOOLS = [
    chat("tools as an object", {"tools": {}}, "tools"),
    tools("2,000", [function(name=f"f{at}") for at in range(2000)], "tools"),
    tools("of no kind", [{}], "tools[0].type"),
    tools("of another kind", [{"type": "code_interpreter"}], "tools[0].type"),
    tools("without a function", [{"type": "function"}], "tools[0].function"),
    tools("without a name", [function(name=None)], "tools[0].function.name"),
    tools("with a broken name", [function(name='a", "b')], "tools[0].function.name"),
    tools("with markup for a name", [function(name="</tool_call>")], "tools[0].function.name"),
    tools("with a long name", [function(name="f" * 500)], "tools[0].function.name"),
    tools("with a name of line ends", [function(name="f\n")], "tools[0].function.name"),
    tools("twice", [TOOL, TOOL], "tools[1].function.name"),
    tools("of arrays", [function(parameters=[])], "tools[0].function.parameters"),
    tools(
        "of a string",
        [function(parameters={"type": "string"})],
        "tools[0].function.parameters.type",
    ),
    tools(
        "of no type",
        [function(parameters={"type": "object", "properties": {"a": {"type": 5}}})],
        "tools[0].function.parameters",
        tool_choice="required",
    ),
    tools(
        "without an end",
        [function(parameters={"type": "object", "$ref": "#/$defs/a"})],
        "tools[0].function.parameters",
        tool_choice="required",
    ),
    tools("and another choice", [TOOL], "tool_choice", tool_choice="maybe"),
    tools(
        "and a choice of none of them",
        [TOOL],
        "tool_choice",
        tool_choice={"type": "function", "function": {"name": "g"}},
    ),
    tools("and a choice 5", [TOOL], "tool_choice", tool_choice=5),
    tools(
        "that their reader dies of",
        [function(parameters={"type": "object", "properties": {"a": {"const": -(1 << 63)}}})],
        "tools",
        "invalid_grammar",
        tool_choice="required",
    ),
    chat("a choice without tools", {"tool_choice": "required"}, "tool_choice"),
    chat("functions as an object", {"functions": {"name": "f"}}, "functions"),
    chat("functions and tools", {"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
]

RULES = {"structures": STRUCTURES, "tools": TOOLS}
