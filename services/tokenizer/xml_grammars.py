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
from services.tokenizer.schemas import SHARED, moved, prepared

_ROOT = "all-parameters"  # what is referred to beside the schema's own definitions
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
        parts: list[Fragment] = []
        for at, (name, value) in enumerate(values_of(function).items()):
            if not name or _IN_TAGS.intersection(name):
                continue
            if function.input_lark:
                written = self._input(number, function)
            else:
                written = self._value(f"{number}_{at}", value, function)
            part = in_order(self._key(literal(name)), written)
            parts.append(part if name in wanted or function.input_lark else optional(part))
        is_open = parameters.get("additionalProperties", True) in (True, {})
        if is_open and "properties" not in parameters and not function.input_lark:
            parts.append(self._any(number))
        return in_order(*parts)

    def _key(self, key: str) -> Fragment:
        begin = self._shared("key_begin", self._tags.key_begin)
        return in_order(
            begin, key, self._shared("key_end", self._tags.key_end + self._before_value)
        )

    def _shared(self, name: str, text: str) -> Fragment:
        """Write a text that all parameters have as a rule: a grammar has 65,000 symbols at most."""
        return Fragment(name, (f"{name}: {self._vocabulary.spelled(text)}",))

    def _any(self, number: int) -> Fragment:
        name = f"key_{number}"
        parameter = in_order(self._key(name), self._text(Text(), TEXT))
        key = f"{name}: /[A-Za-z_][A-Za-z0-9_.\\-]*/"
        return repeated(replace(parameter, rules=(key, *parameter.rules)))

    def _input(self, number: int, function: Function) -> Fragment:
        name = f"input_{number}"
        text = Fragment(f"@{name}", grammars=((name, function.input_lark),))
        return in_order(literal('"'), text, literal('"'), self._end)

    def _value(self, name: str, value: Value, function: Function) -> Fragment:
        """Return the grammar of a value and of what stands behind it."""
        is_free = any(not text.choices for text in value.texts)
        ways = [self._text(text, value.kinds) for text in value.texts]
        for at, schema in enumerate(value.schemas):
            words = _words(schema) if is_free else ()
            ways += [Fragment(self._ended(word)) for word in words]
            if words:
                continue
            rule = f"value_{name}_{at}"
            whole = prepared(_rooted(schema, function.parameters), lenient=not function.strict)
            written = Fragment(rule, (json_rule(rule, whole),))
            ways.append(in_order(written, self._end))
        return one_of(ways)

    @property
    def _end(self) -> Fragment:
        return self._shared("value_end", f"{self._line}{self._tags.value_end}{self._behind}")

    def _ended(self, text: str) -> str:
        """Write a text and the end of a value, in one lexeme if the end is no special token."""
        return self._vocabulary.spelled(f"{text}{self._line}{self._tags.value_end}{self._behind}")

    def _text(self, text: Text, kinds: str) -> Fragment:
        """Return the grammar of a text and its end; of one unlike JSON of the value's kinds.

        Texts alike share their rules, which the grammar has once.
        """
        if text.choices:
            return one_of([Fragment(self._ended(each)) for each in text.choices])
        end, behind = self._tags.value_end, self._vocabulary.spelled
        most = "" if text.max_length is None else text.max_length
        inside = f"{_TEXT}{{{text.min_length},{most}}}"
        rule = f"text_{kinds}_{text.min_length}_{most}"
        token = rule.upper()
        is_token = self._vocabulary.is_special(end)
        shown = "" if is_token else escaped(end)
        line = escaped(self._line)
        more = "*" if is_token else "+"
        kept = f"/{inside}{line}{shown}/ & ~/{_TEXT}*{escaped(end)}{_TEXT}{more}/"
        if like_json := _like_json(kinds):
            kept += f" & ~/{like_json}{line}{shown}/"
        tail = behind(f"{end}{self._behind}") if is_token else behind(self._behind)
        ended = f"{rule}_ended"
        if is_token:
            return Fragment(ended, (f"{ended}: {token} {tail}", f"{token}: {kept}"))
        rules = (f"{ended}: {rule} {tail}", f"{rule}[lazy]: {token}", f"{token}: {kept}")
        return Fragment(ended, rules)


def _rooted(schema: Any, parameters: dict[str, Any]) -> Any:
    """Return a parameter's schema with all that it refers to."""
    if not isinstance(schema, dict):
        return schema
    shared = {key: value for key, value in parameters.items() if key in SHARED}
    alone = {**shared, **schema}
    whole = moved(alone, f"#/$defs/{_ROOT}")
    if whole != alone:
        rest = {key: value for key, value in parameters.items() if key not in SHARED}
        whole["$defs"] = {**whole.get("$defs", {}), _ROOT: moved(rest, f"#/$defs/{_ROOT}")}
    return whole


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
