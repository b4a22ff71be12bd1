"""Hermes 2 and 3, Qwen 2.5 and 3, and the demo: a tagged JSON object for each call."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, literal, one_of, separated
from services.tokenizer.tool_grammars.protocol import Dialect, call_object


def calls(functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
    """`<tool_call>`, a line with name and arguments, `</tool_call>`; each call on its own."""
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
