"""What each format of tool calls provides, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.chat_formats import ToolMarkers
from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, in_order, json_rule, literal
from services.tokenizer.schemas import closed, prepared
from services.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes a format: its markers and tokens, and the template it was made with."""

    markers: ToolMarkers
    vocabulary: Vocabulary
    template: str


class ToolGrammar(Protocol):
    """One format of tool calls."""

    def __call__(self, functions: Sequence[Function], dialect: Dialect, max_calls: int) -> Fragment:
        """Return the grammar of one to `max_calls` calls, arguments by each function's schema."""
        ...


def arguments(number: int, function: Function) -> Fragment:
    """Return the grammar of a function's arguments, a JSON object, as the rule of this number."""
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
    """Return the grammar of a text that has one of its own, between two that are always there."""
    name = f"input_{number}"
    text = Fragment(f"@{name}", grammars=((name, function.input_lark),))
    return in_order(Fragment(literal(before)), text, Fragment(literal(after)))
