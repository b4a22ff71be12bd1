"""Writes grammars as llguidance reads them: Lark's syntax with JSON schemas and token ids inside.

It knows the syntax, but nothing about chats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

FREE_TEXT = "<[*]>*"  # any tokens, special ones too


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a grammar: its expression, and the rules and grammars which that refers to.

    `rules` are lines of the main grammar. `grammars` are (name, text) of grammars with rules of
    their own, which an expression refers to as `@name`.
    """

    expression: str
    rules: tuple[str, ...] = ()
    grammars: tuple[tuple[str, str], ...] = ()


def literal(text: str) -> str:
    """Write a text literally."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Write a text as a regular expression to stand between slashes."""
    escaped = "".join(f"\\{char}" if char in "/[]().*+?|\\{}^$" else char for char in text)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")


def optional(fragment: Fragment) -> Fragment:
    return replace(fragment, expression=f"({fragment.expression})?")


def one_of(fragments: Sequence[Fragment]) -> Fragment:
    if len(fragments) == 1:
        return fragments[0]
    return _joined(fragments, "(" + " | ".join(part.expression for part in fragments) + ")")


def in_order(*fragments: Fragment) -> Fragment:
    return _joined(fragments, " ".join(part.expression for part in fragments))


def separated(fragment: Fragment, separator: str, max_items: int) -> Fragment:
    """Repeat a fragment one to `max_items` times, with the separator between."""
    item = fragment.expression
    if max_items == 1:
        return fragment
    between = f"{separator} {item}".strip()
    return replace(fragment, expression=f"{item} ({between}){{0,{max_items - 1}}}")


def json_rule(name: str, schema: Any) -> str:
    """Write a rule for the JSON that a schema describes."""
    return f"{name}: %json {json.dumps(schema, ensure_ascii=False)}"


def grammar_of(fragment: Fragment) -> str:
    """Write the whole grammar, in the JSON form if it has grammars inside."""
    main = "\n".join((f"start: {fragment.expression}", *fragment.rules))
    if not fragment.grammars:
        return main
    parts = [{"name": "answer", "lark_grammar": main}]
    parts += [{"name": name, "lark_grammar": text} for name, text in fragment.grammars]
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _joined(fragments: Sequence[Fragment], expression: str) -> Fragment:
    return Fragment(
        expression,
        rules=tuple(rule for part in fragments for rule in part.rules),
        grammars=tuple(grammar for part in fragments for grammar in part.grammars),
    )
