"""DeepSeek V3 and R1: JSON in a fence behind the name; from V3.1 on without the fence."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, literal, one_of, separated
from services.tokenizer.tool_grammars.protocol import Dialect, arguments

_FENCE = "```json"


def calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """All calls between two tokens, each one between two more."""
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
