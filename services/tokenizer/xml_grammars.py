"""Grammars of calls whose parameters stand between tags, the values as they are.

The end of a value belongs to the lexeme of a text: llguidance takes the longest lexeme and never
backtracks, so a text that only went up to the tag would take the tag in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.chat_formats import ParameterMarkers
from common.parameter_kinds import ARRAY, BOOLEAN, INTEGER, NULL, OBJECT, TEXT
from services.tokenizer.functions import Function
from services.tokenizer.lark import (
    Fragment,
    Vocabulary,
    escaped,
    in_order,
    json_rule,
    literal,
    one_of,
    optional,
    repeated,
)
from services.tokenizer.parameter_values import Text, Value, values_of
from services.tokenizer.schemas import SHARED, prepared

_TEXT = r"(.|\n)"
_SPACE = r"[ \t\r\n]*"
# What texts begin with that are, or could become, JSON of a kind, and words that are.
_FIRST = {INTEGER: r"\-0-9", ARRAY: r"\[", OBJECT: r"\{"}
_WORDS = {NULL: "null|None", BOOLEAN: "true|false|True|False"}
_IN_TAGS = frozenset('<>"\n')


class ParameterGrammar:
    """Writes the parameters of calls in one format.

    `between_tags` stands behind every parameter, and between a key and the tag before its value.
    """

    def __init__(
        self, tags: ParameterMarkers, vocabulary: Vocabulary, between_tags: str = "\n"
    ) -> None:
        self._tags = tags
        self._vocabulary = vocabulary
        line = "\n" if tags.on_lines else ""
        self._before_value = f"{between_tags if tags.value_begin else ''}{tags.value_begin}{line}"
        self._line = line
        self._behind = between_tags

    def write(self, number: int, function: Function) -> Fragment:
        """Return the grammar of a function's parameters in the order of its schema."""
        parameters = function.parameters
        required = parameters.get("required")
        wanted = set(map(str, required)) if isinstance(required, list) else set()
        shared = {key: parameters[key] for key in SHARED if key in parameters}
        parts: list[Fragment] = []
        for at, (name, value) in enumerate(values_of(function).items()):
            if not name or _IN_TAGS.intersection(name):
                continue
            if function.input_lark:
                written = self._input(number, function)
            else:
                written = self._value(f"{number}_{at}", value, shared, function.strict)
            part = in_order(self._key(literal(name)), written)
            parts.append(part if name in wanted or function.input_lark else optional(part))
        is_open = parameters.get("additionalProperties", True) in (True, {})
        if is_open and "properties" not in parameters and not function.input_lark:
            parts.append(self._any(number))
        return in_order(*parts)

    def _key(self, key: str) -> str:
        tags, spelled = self._tags, self._vocabulary.spelled
        behind = spelled(tags.key_end + self._before_value)
        return f"{spelled(tags.key_begin)} {key} {behind}"

    def _any(self, number: int) -> Fragment:
        """Return the grammar of any parameters."""
        name = f"key_{number}"
        parameter = in_order(self._key(name), self._text(f"{number}_any", Text(), TEXT))
        key = f"{name}: /[A-Za-z_][A-Za-z0-9_.\\-]*/"
        return repeated(replace(parameter, rules=(key, *parameter.rules)))

    def _input(self, number: int, function: Function) -> Fragment:
        name = f"input_{number}"
        text = Fragment(f"@{name}", grammars=((name, function.input_lark),))
        return in_order(literal('"'), text, literal('"'), self._ended())

    def _value(self, name: str, value: Value, shared: dict[str, Any], strict: bool) -> Fragment:
        """Return the grammar of a value and of what stands behind it."""
        is_free = any(not text.choices for text in value.texts)
        ways = [
            self._text(f"{name}_{at}", text, value.kinds) for at, text in enumerate(value.texts)
        ]
        for at, schema in enumerate(value.schemas):
            words = _words(schema) if is_free else ()
            ways += [Fragment(self._ended(word)) for word in words]
            if words:
                continue
            rule = f"value_{name}_{at}"
            if isinstance(schema, dict):
                schema = {**shared, **schema}
            written = Fragment(rule, (json_rule(rule, prepared(schema, lenient=not strict)),))
            ways.append(in_order(written, self._ended()))
        return one_of(ways)

    def _ended(self, text: str = "") -> str:
        """Write a text and the end of a value, in one lexeme if the end is no special token."""
        return self._vocabulary.spelled(f"{text}{self._line}{self._tags.value_end}{self._behind}")

    def _text(self, name: str, text: Text, kinds: str) -> Fragment:
        """Return the grammar of a text and its end; of one unlike JSON of the value's kinds."""
        if text.choices:
            return one_of([Fragment(self._ended(each)) for each in text.choices])
        end, behind = self._tags.value_end, self._vocabulary.spelled
        most = "" if text.max_length is None else text.max_length
        inside = f"{_TEXT}{{{text.min_length},{most}}}"
        rule, token = f"text_{name}", f"TEXT_{name.upper()}"
        is_token = self._vocabulary.is_special(end)
        shown = "" if is_token else escaped(end)
        line = escaped(self._line)
        more = "*" if is_token else "+"
        kept = f"/{inside}{line}{shown}/ & ~/{_TEXT}*{escaped(end)}{_TEXT}{more}/"
        if like_json := _like_json(kinds):
            kept += f" & ~/{like_json}{line}{shown}/"
        tail = behind(f"{end}{self._behind}") if is_token else behind(self._behind)
        if is_token:
            return Fragment(f"{token} {tail}", (f"{token}: {kept}",))
        return in_order(Fragment(rule, (f"{rule}[lazy]: {token}", f"{token}: {kept}")), tail)


def _like_json(kinds: str) -> str:
    """Return the regular expression of texts that would be read as JSON; empty if none would."""
    first = "".join(_FIRST.get(kind, "") for kind in kinds)
    ways = [_WORDS[kind] for kind in kinds if kind in _WORDS]
    if first:
        ways.append(f"[{first}]{_TEXT}*")
    return f"{_SPACE}({'|'.join(ways)}){_SPACE}" if ways else ""


def _words(schema: Any) -> Sequence[str]:
    """Return the words that a schema allows, if it allows some words and nothing else."""
    match schema:
        case {"const": None | bool()}:
            return (json.dumps(schema["const"]),)
        case {"type": "null"}:
            return ("null",)
        case {"type": "boolean"}:
            return ("true", "false")
    return ()
