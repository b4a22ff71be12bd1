"""Llama 3.2 and 4 by their pythonic templates: a list of calls as Python writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, json_rule, literal, one_of, separated
from services.tokenizer.schemas import prepared
from services.tokenizer.tool_grammars.protocol import Dialect, text_argument

_SHARED = ("$defs", "definitions")
_WORD = re.compile(r"[A-Za-z_]\w*")
# What Python writes otherwise than JSON; inside of lists and objects JSON's words stand.
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """`[f(a=1), g(b="x")]`: arguments by name, in the order of the schema."""
    bodies = [_call(number, function) for number, function in enumerate(functions)]
    several = separated(one_of(bodies), literal(", "), max_calls)
    return in_order(Fragment(literal("[")), several, Fragment(literal("]")))


def _call(number: int, function: Function) -> Fragment:
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
        if not _WORD.fullmatch(name):
            if name in required:
                required.discard(name)
            continue
        value, more = _value(f"value_{number}_{at}", named.get(name, {}), shared, function.strict)
        rules += [f"argument_{number}_{at}: {literal(name + '=')} {value}", *more]
    kept = [(at, name in required) for at, name in enumerate(names) if _WORD.fullmatch(name)]
    listed, more = _listed(number, kept)
    expression = f"{literal(function.name + '(')} {listed} {literal(')')}"
    return Fragment(expression, (*rules, *more))


def _listed(number: int, arguments: list[tuple[int, bool]]) -> tuple[str, list[str]]:
    """Write a list in order with some left out: `rest` rules begin with a comma each."""
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


def _value(name: str, schema: Any, shared: dict[str, Any], strict: bool) -> tuple[str, list[str]]:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    plain = isinstance(schema, dict) and not {"enum", "const"} & schema.keys()
    words = [literal(word) for one in kinds for word in _WORDS.get(str(one), ()) if plain]
    if words and all(str(one) in _WORDS for one in kinds):
        return f"({' | '.join(words)})", []
    if isinstance(schema, dict):
        if words:
            others = [one for one in kinds if str(one) not in _WORDS]
            schema = {**schema, "type": others}
        schema = {**shared, **schema}
    rules = [json_rule(name, prepared(schema, lenient=not strict))]
    return (f"({' | '.join([*words, name])})" if words else name), rules
