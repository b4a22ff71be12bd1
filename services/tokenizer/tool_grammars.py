"""The grammars of answers that call tools, one for each format of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from common.chat_formats import ToolMarkers
from common.messages.tokenize import ToolUse
from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, json_rule, literal, one_of, separated
from services.tokenizer.schemas import closed, prepared
from services.tokenizer.vocabulary import Vocabulary

_SHARED = ("$defs", "definitions")
_FENCE = "```json"
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w*")
# Words that Python writes unlike JSON; inside lists and objects the models write JSON's.
_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
# The formats in which no call begins without the first marker.
MARKED = frozenset({"deepseek", "hermes", "mistral"})
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes a format: its markers, its vocabulary and its chat template."""

    markers: ToolMarkers
    vocabulary: Vocabulary
    template: str


class ToolGrammar(Protocol):
    """One format of tool calls."""

    def __call__(self, functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
        """Return the grammar of one to `max_calls` calls, arguments by each function's schema."""
        ...


def arguments(number: int, function: Function) -> Fragment:
    """Return the grammar of a function's arguments, a JSON object; `number` names its rule."""
    if function.input_lark:
        return text_argument(number, function, '{"input": "', '"}')
    schema = prepared(closed(function.parameters), lenient=not function.strict)
    name = f"arguments_{number}"
    return Fragment(name, (json_rule(name, schema),))


def call_object(number: int, function: Function, key: str) -> Fragment:
    """Return the grammar of `{"name": …, "arguments": {…}}`, the arguments under this key."""
    head = f'{{"name": {json.dumps(function.name)}, "{key}": '
    return in_order(Fragment(literal(head)), arguments(number, function), Fragment(literal("}")))


def text_argument(number: int, function: Function, before: str, after: str) -> Fragment:
    """Return the grammar of a text argument that has its own grammar, between two fixed texts."""
    name = f"input_{number}"
    text = Fragment(f"@{name}", grammars=((name, function.input_lark),))
    return in_order(Fragment(literal(before)), text, Fragment(literal(after)))


def hermes_calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """Hermes 2 and 3, Qwen 2.5 and 3, and the demo: a tagged JSON object for each call.

    `<tool_call>`, a line with name and arguments, `</tool_call>`; each call on its own.
    """
    markers, marker = dialect.markers, dialect.vocabulary.marker
    body = one_of(
        [call_object(number, function, "arguments") for number, function in enumerate(functions)]
    )
    call = in_order(
        Fragment(f"{marker(markers.begin)} {literal(chr(10))}"),
        Fragment("call_body", (f"call_body: {body.expression}", *body.rules), body.grammars),
        Fragment(f"{literal(chr(10))} {marker(markers.end)}"),
    )
    return separated(call, literal("\n"), max_calls)


def mistral_calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """Mistral: a JSON array after a token, or from tokenizer version 11 on, name and arguments.

    `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` per call.
    """
    if dialect.markers.arguments in dialect.template:
        return _marked_mistral_calls(functions, dialect, max_calls)
    bodies = [
        call_object(number, function, "arguments") for number, function in enumerate(functions)
    ]
    several = separated(one_of(bodies), literal(", "), max_calls)
    begin = dialect.vocabulary.marker(dialect.markers.begin)
    # The models write a blank after the token, or none, by the version of their tokenizer.
    return in_order(Fragment(f'{begin} (" ")? "["'), several, Fragment('"]"'))


def _marked_mistral_calls(
    functions: Sequence[Function], dialect: Dialect, max_calls: int
) -> Fragment:
    markers, marker = dialect.markers, dialect.vocabulary.marker
    between = marker(markers.arguments)
    if markers.call_id in dialect.template:
        between = f"({marker(markers.call_id)} /[0-9A-Za-z]{{9}}/)? {between}"
    bodies = [
        in_order(Fragment(f"{literal(function.name)} {between}"), arguments(number, function))
        for number, function in enumerate(functions)
    ]
    return separated(in_order(Fragment(marker(markers.begin)), one_of(bodies)), "", max_calls)


def deepseek_calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """DeepSeek V3 and R1: JSON in a fence behind the name; from V3.1 on without the fence.

    All calls stand between two tokens, each one between two more.
    """
    markers, marker = dialect.markers, dialect.vocabulary.marker
    fenced = _FENCE in dialect.template
    separator = marker(markers.arguments)
    bodies = []
    for number, function in enumerate(functions):
        given = arguments(number, function)
        if fenced:
            name = literal(f"{function.name}\n{_FENCE}\n")
            opening = Fragment(f"{literal('function')} {separator} {name}")
            bodies.append(in_order(opening, given, Fragment(literal("\n```"))))
        else:
            bodies.append(in_order(Fragment(f"{literal(function.name)} {separator}"), given))
    call = in_order(
        Fragment(marker(markers.call_begin)), one_of(bodies), Fragment(marker(markers.call_end))
    )
    several = separated(call, literal("\n") if fenced else "", max_calls)
    return in_order(Fragment(marker(markers.begin)), several, Fragment(marker(markers.end)))


def llama_json_calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """Llama 3.1 to 3.3, and Llama 4 by its own template: a bare JSON object, maybe after a token.

    `{"name": …, "parameters": {…}}`, with `; ` between several.

    The whole call is one schema instead of text around the arguments' schema: where an answer may
    also be JSON of another schema, llguidance follows both only if both are schemas.
    """
    markers = dialect.markers
    bodies = [
        call_object(number, function, markers.arguments_key)
        if function.input_lark
        else Fragment(
            f"call_{number}", (json_rule(f"call_{number}", _call_schema(function, markers)),)
        )
        for number, function in enumerate(functions)
    ]
    many = separated(one_of(bodies), literal(f"{markers.separator} "), max_calls)
    token_id = dialect.vocabulary.token_of(markers.begin)
    if token_id is None:
        return many
    return in_order(Fragment(f"({dialect.vocabulary.marker(markers.begin)})?"), many)


def _call_schema(function: Function, markers: Any) -> Any:
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
    """Redirect references to the schema's root to its new place; shared parts stay at the top."""
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


def llama_pythonic_calls(
    functions: Sequence[Function], dialect: Dialect, max_calls: int
) -> Fragment:
    """Llama 3.2 and 4 by their pythonic templates: a list of calls as Python writes them.

    `[f(a=1), g(b="x")]`: arguments by name, in the order of the schema.
    """
    bodies = [_pythonic_call(number, function) for number, function in enumerate(functions)]
    several = separated(one_of(bodies), literal(", "), max_calls)
    return in_order(Fragment(literal("[")), several, Fragment(literal("]")))


def _pythonic_call(number: int, function: Function) -> Fragment:
    if function.input_lark:
        return text_argument(number, function, f'{function.name}(input="', '")')
    properties = function.parameters.get("properties")
    named = properties if isinstance(properties, dict) else {}
    wanted = function.parameters.get("required")
    required = set(wanted) if isinstance(wanted, list) else set()
    names = [*named, *(name for name in sorted(required) if name not in named)]
    shared = {key: function.parameters[key] for key in _SHARED if key in function.parameters}
    rules: list[str] = []
    for at, name in enumerate(names):
        if not _PYTHON_NAME.fullmatch(name):
            if name in required:
                required.discard(name)
            continue
        value, more = _pythonic_value(
            f"value_{number}_{at}", named.get(name, {}), shared, function.strict
        )
        rules += [f"argument_{number}_{at}: {literal(name + '=')} {value}", *more]
    kept = [(at, name in required) for at, name in enumerate(names) if _PYTHON_NAME.fullmatch(name)]
    listed, more = _pythonic_arguments(number, kept)
    expression = f"{literal(function.name + '(')} {listed} {literal(')')}"
    return Fragment(expression, (*rules, *more))


def _pythonic_arguments(number: int, arguments: list[tuple[int, bool]]) -> tuple[str, list[str]]:
    """Write the arguments in order, any optional one left out; each `after` rule has a comma."""
    rules: list[str] = []
    alternatives: list[str] = []
    open_end = True  # whether all arguments up to here may be left out
    for place, (at, is_required) in enumerate(arguments):
        tail = " ".join(
            f"after_{number}_{later}" if must else f"(after_{number}_{later})?"
            for later, must in arguments[place + 1 :]
        )
        rules.append(f"after_{number}_{at}: {literal(', ')} argument_{number}_{at}")
        if open_end:
            alternatives.append(f"argument_{number}_{at} {tail}".strip())
        open_end = open_end and not is_required
    if not alternatives:
        return "", []
    rules.append(f"listed_{number}: " + " | ".join(alternatives))
    return (f"(listed_{number})?" if open_end else f"listed_{number}"), rules


def _pythonic_value(
    name: str, schema: Any, shared: dict[str, Any], strict: bool
) -> tuple[str, list[str]]:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    plain = isinstance(schema, dict) and not {"enum", "const"} & schema.keys()
    words = [literal(word) for one in kinds for word in _PYTHON_WORDS.get(str(one), ()) if plain]
    if words and all(str(one) in _PYTHON_WORDS for one in kinds):
        return f"({' | '.join(words)})", []
    if isinstance(schema, dict):
        if words:
            others = [one for one in kinds if str(one) not in _PYTHON_WORDS]
            schema = {**schema, "type": others}
        schema = {**shared, **schema}
    rules = [json_rule(name, prepared(schema, lenient=not strict))]
    return (f"({' | '.join([*words, name])})" if words else name), rules


def watched_calls(
    tools: ToolUse,
    functions: Sequence[Function],
    dialect: Dialect,
    make: ToolGrammar,
    max_calls: int,
) -> Fragment | None:
    """Return free text whose calls obey the client's rules: strict arguments, or one call at most.

    None if there are no such rules, or if the first marker is not a token that free text can be
    kept from. Functions that are not strict take any object as their arguments.
    """
    begin, vocabulary = dialect.markers.begin, dialect.vocabulary
    token_id = vocabulary.token_of(begin) if vocabulary.is_special(begin) else None
    is_wanted = not tools.parallel or any(function.strict for function in functions)
    if token_id is None or not is_wanted:
        return None
    loosened = [
        function if function.strict else replace(function, parameters=_ANY_OBJECT)
        for function in functions
    ]
    text = f"{vocabulary.any(without=token_id)}*"
    calls = make(loosened, dialect, max_calls)
    how_often = "*" if max_calls > 1 else "?"
    return replace(calls, expression=f"{text} ({calls.expression} {text}){how_often}")


TOOL_GRAMMARS: Final[Mapping[str, ToolGrammar]] = {
    "hermes": hermes_calls,
    "llama_json": llama_json_calls,
    "llama_pythonic": llama_pythonic_calls,
    "mistral": mistral_calls,
    "deepseek": deepseek_calls,
}
