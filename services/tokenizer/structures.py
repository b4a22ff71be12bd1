"""The grammar of a structured answer: JSON, a regex, a choice, a client's grammar.

Runs in a process of the pool, within its limits, since the texts come from clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from common.messages.tokenize import Structure
from services.tokenizer.jobs import Refused, refused
from services.tokenizer.lark import Fragment, json_rule, literal
from services.tokenizer.schemas import prepared

_NAME = "structure"
# GBNF and EBNF define with ::=, Lark with a colon alone.
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)


def structure_grammar(structure: Structure, name: str = _NAME) -> Fragment:
    """Return the grammar of a structure, named `name`; Refused for an invalid one."""
    match structure.kind:
        case "json_object":
            schema = prepared({"type": "object"}, compact=structure.compact)
            return Fragment(name, (json_rule(name, schema),))
        case "json_schema":
            schema = _parsed(structure, "a JSON schema")
            if not isinstance(schema, dict | bool):
                raise _bad(structure, "a JSON schema must be an object")
            schema = prepared(schema, not structure.strict, structure.compact)
            return Fragment(name, (json_rule(name, schema),))
        case "regex":
            return Fragment(name, (f"{name}: /{_regex(structure)}/",))
        case "choice":
            return Fragment(name, (f"{name}: {_choice(structure)}",))
        case "grammar":
            return Fragment(f"@{name}", grammars=((name, _lark(structure)),))
    raise AssertionError(structure.kind)  # structural tags are in structural_tags.py


def _regex(structure: Structure) -> str:
    from llguidance import regex_to_lark

    try:
        # Digits are ASCII: the others depend on the version of Unicode, and the client that checks
        # the answer may have another one. The group keeps an empty regex from reading as a comment.
        pattern = regex_to_lark(structure.text, "d").replace("\n", "\\n")
        return f"(?:{pattern})"
    except ValueError as error:
        raise _bad(structure, f"this regular expression is not valid: {error}") from error


def _choice(structure: Structure) -> str:
    choices = _parsed(structure, "a list of choices")
    if not isinstance(choices, list) or not choices:
        raise _bad(structure, "give at least one choice")
    if not all(isinstance(choice, str) for choice in choices):
        raise _bad(structure, "every choice must be a text")
    return " | ".join(literal(choice) for choice in dict.fromkeys(choices))


def _lark(structure: Structure) -> str:
    if not _GBNF_RULE.search(structure.text):
        return structure.text
    try:
        return _from_gbnf(structure.text)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the converter raises what it likes
        raise _bad(structure, f"this grammar is not valid GBNF or EBNF: {error}") from error


def _from_gbnf(text: str) -> str:
    """Convert with llguidance's converter; without a rule `root` the first rule is the start."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules = GrammarParser().parse(text)
    if "root" not in rules:
        first = next(iter(rules))
        for node in _nodes(rules.values()):
            if getattr(node, "name", None) == first:
                node.name = "root"
        rules = {rule.name: rule for rule in rules.values()}
    resolve(rules)
    return "\n".join(str(rule) for rule in rules.values())


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    for root in roots:
        yield root
        yield from _nodes(root.children())


def _parsed(structure: Structure, what: str) -> Any:
    try:
        return json.loads(structure.text)
    except ValueError as error:
        raise _bad(structure, f"{what} must be valid JSON: {error}") from error


def _bad(structure: Structure, message: str) -> Refused:
    return refused(message, "invalid_grammar", structure.field)  # as compute says
