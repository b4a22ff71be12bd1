"""Mistral: a JSON array after a token, or from tokenizer version 11 on, name and arguments."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, literal, one_of, separated
from services.tokenizer.tool_grammars.protocol import Dialect, arguments, call_object


def calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` per call."""
    if dialect.markers.arguments in dialect.template:
        return _marked(functions, dialect, max_calls)
    bodies = [
        call_object(number, function, "arguments") for number, function in enumerate(functions)
    ]
    several = separated(one_of(bodies), literal(", "), max_calls)
    begin = dialect.vocabulary.marker(dialect.markers.begin)
    # The models write a blank after the token, or none, by the version of their tokenizer.
    return in_order(Fragment(f'{begin} (" ")? "["'), several, Fragment('"]"'))


def _marked(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    markers, marker = dialect.markers, dialect.vocabulary.marker
    between = marker(markers.arguments)
    if markers.call_id in dialect.template:
        between = f"({marker(markers.call_id)} /[0-9A-Za-z]{{9}}/)? {between}"
    bodies = [
        in_order(Fragment(f"{literal(function.name)} {between}"), arguments(number, function))
        for number, function in enumerate(functions)
    ]
    return separated(in_order(Fragment(marker(markers.begin)), one_of(bodies)), "", max_calls)
