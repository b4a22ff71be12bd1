"""The grammar of a structured answer: JSON, a regex, a choice, a client's grammar, structural tags.

Runs in a process of the pool, within its limits, since the texts come from clients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from common.messages.tokenize import Structure, StructureKind
from services.tokenizer.jobs import Refused
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
from services.tokenizer.schemas import prepared

MAX_REPEATS = 1000
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}

# GBNF and EBNF define with ::=, Lark with a colon alone.
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)
_TEXT = r"(.|\n)*"
_FREE = Fragment("FREE_TEXT?", (f"FREE_TEXT: /{_TEXT}/",))

# The texts that end a format of a structural tag, one of which belongs to it. Without any, the
# format is the last of the answer; None means that more follows without such a mark.
Ends: TypeAlias = tuple[str, ...] | None


def structure_grammar(structure: Structure, vocabulary: Vocabulary) -> Fragment:
    """Return the grammar of a structure; Refused for an invalid one."""
    if structure.kind != "structural_tag":
        return _simple_grammar(structure, "structure")
    tags = _StructuralTag(structure, vocabulary)
    whole = tags.write(_parsed(structure, "a structural tag"), ())
    return replace(whole, rules=tuple(dict.fromkeys(whole.rules)))


def _simple_grammar(structure: Structure, name: str) -> Fragment:
    """Return the grammar of a structure that has no other inside; `name` is its rule."""
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
            choices = " | ".join(map(literal, json.loads(structure.text)))
            return Fragment(name, (f"{name}: {choices}",))
        case "grammar":
            return Fragment(f"@{name}", grammars=((name, _lark(structure)),))
    raise AssertionError(structure.kind)


def _regex(structure: Structure) -> str:
    from llguidance import regex_to_lark

    try:
        # Digits are ASCII: the others depend on the version of Unicode, and the client that checks
        # the answer may have another one. The group keeps an empty regex from reading as a comment.
        return "(?:" + regex_to_lark(structure.text, "d").replace("\n", "\\n") + ")"
    except ValueError as error:
        raise _bad(structure, f"this regular expression is not valid: {error}") from error


def _lark(structure: Structure) -> str:
    if not _GBNF_RULE.search(structure.text):
        return structure.text
    try:
        return _from_gbnf(structure.text)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the converter can raise anything
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
    return Refused(message, "invalid_grammar", structure.field)  # as compute says


class _StructuralTag:
    """Free text in which tags begin constrained parts, in xgrammar's formats.

    Writes formats, each with the ends behind it; the names of its rules count up.
    """

    def __init__(self, structure: Structure, vocabulary: Vocabulary) -> None:
        self._whole = structure
        self._vocabulary = vocabulary
        self._num_rules = 0

    def write(self, value: Any, ends: Ends) -> Fragment:
        """Return the grammar of a format and one of its ends."""
        if not isinstance(value, dict):
            raise self._wrong("a format must be an object")
        kind = value.get("type")
        if ends is None and kind in ("any_text", "triggered_tags"):
            raise self._wrong(f"{kind} can only be the last part of a tag or of the answer")
        match kind:
            case "any_text":
                return self._text_until(ends or (), self._texts(value, "excludes"))
            case "triggered_tags":
                return self._triggered(value, ends or ())
            case "tag":
                return self._tag(value, ends)
            case "sequence":
                *before, last = self._formats(value, "elements")
                parts = [self.write(element, None) for element in before]
                return in_order(*parts, self.write(last, ends))
            case "or":
                elements = self._formats(value, "elements")
                return one_of([self.write(element, ends) for element in elements])
            case "tags_with_separator":
                return self._then(self._separated(value), ends)
            case "optional" | "star" | "plus" | "repeat":
                return self._then(self._repeated(value), ends)
            case _:
                return self._then(self._simple(value), ends)

    def _simple(self, value: dict[str, Any]) -> Fragment:
        """Write a format that has no format inside."""
        kind: StructureKind
        match value.get("type"):
            case "const_string":
                return Fragment(self._vocabulary.spelled(self._text(value, "value")))
            case "json_schema":
                if value.get("style", "json") != "json":
                    raise self._wrong("the style of a json_schema can only be json")
                schema = value.get("json_schema")  # a string in the older form
                kind, text = (
                    "json_schema",
                    schema if isinstance(schema, str) else json.dumps(schema),
                )
            case "regex":
                kind, text = "regex", self._text(value, "pattern")
            case "grammar":
                kind, text = "grammar", self._text(value, "grammar")
            case other:
                raise self._wrong(f"there is no format of the type {json.dumps(other)[:40]} here")
        return _simple_grammar(replace(self._whole, kind=kind, text=text), self._name(kind))

    def _tag(self, value: Any, ends: Ends = None) -> Fragment:
        begin = self._vocabulary.spelled(self._text(value, "begin"))
        return in_order(begin, self._behind_begin(value, ends))

    def _behind_begin(self, tag: dict[str, Any], ends: Ends = None) -> Fragment:
        end = tag.get("end")
        given = end if isinstance(end, list) else [end]
        if not given or not all(isinstance(text, str) for text in given):
            raise self._wrong("the end of a tag must be a text or several")
        own = tuple(text for text in given if text)
        if not own:
            return self.write(tag.get("content"), ends)
        return self._then(self.write(tag.get("content"), own), ends)

    def _triggered(self, value: dict[str, Any], ends: tuple[str, ...]) -> Fragment:
        """Write free text in which each trigger begins one of its tags."""
        triggers, excludes = self._texts(value, "triggers"), self._texts(value, "excludes")
        if not triggers or not all(triggers):
            raise self._wrong("triggers must be a list of texts")
        tags = self._formats(value, "tags")
        rests: dict[str, list[Fragment]] = {}
        for tag in tags:
            begin = self._text(tag, "begin")
            met = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not met:
                raise self._wrong(f"the tag {json.dumps(begin)[:60]} begins with no trigger")
            trigger = min(met, key=len)  # the first that is seen
            spelled = self._vocabulary.spelled(begin[len(trigger) :])
            rests.setdefault(trigger, []).append(in_order(spelled, self._behind_begin(tag)))
        begun = one_of(
            [
                in_order(self._text_until((trigger,), excludes), one_of(behind))
                for trigger, behind in rests.items()
            ]
        )
        tail = self._text_until(ends, excludes)
        once = value.get("stop_after_first")
        if not value.get("at_least_one"):
            if once:
                return one_of([self._then(begun, ends), tail])
            return in_order(repeated(begun), tail)
        first = one_of([self._tag(tag) for tag in tags])  # nothing comes before it, as in xgrammar
        return self._then(first, ends) if once else in_order(first, repeated(begun), tail)

    def _separated(self, value: dict[str, Any]) -> Fragment:
        tags = one_of([self._tag(tag) for tag in self._formats(value, "tags")])
        separator = self._vocabulary.spelled(self._text(value, "separator"))
        if not value.get("stop_after_first"):
            tags = in_order(tags, repeated(in_order(separator, tags)))
        return tags if value.get("at_least_one") else optional(tags)

    def _repeated(self, value: dict[str, Any]) -> Fragment:
        item = self.write(value.get("content"), None)
        if value["type"] in _REPEATS:
            return repeated(item, _REPEATS[value["type"]])
        least, most = value.get("min", 0), value.get("max", MAX_REPEATS)
        if most == -1:
            most = MAX_REPEATS
        if type(least) is not int or type(most) is not int or not 0 <= least <= most <= MAX_REPEATS:
            raise self._wrong(f"min and max of a repeat must be 0 to {MAX_REPEATS}, in order")
        return repeated(item, f"{{{least},{most}}}") if most else Fragment(literal(""))

    def _text_until(self, ends: tuple[str, ...], excludes: tuple[str, ...] = ()) -> Fragment:
        """Write free text up to and including the first end; to the end of the answer if none."""
        without = "|".join(escaped(text) for text in excludes if text)
        kept = f" & ~/{_TEXT}({without}){_TEXT}/" if without else ""
        if not ends:
            return self._token(f"/{_TEXT}/{kept}") if kept else _FREE
        name = self._name("until")
        stops = "|".join(map(escaped, ends))
        rules = (f"{name}[lazy]: {name.upper()}", f"{name.upper()}: /{_TEXT}({stops})/{kept}")
        ways = [Fragment(name, rules)]
        for end in ends:
            before, *parts = self._vocabulary.parts(end)
            if self._vocabulary.is_special(before):
                before, parts = "", [before, *parts]
            if parts:  # a special token, which no text matches
                text = self._token(f"/{_TEXT}{escaped(before)}/{kept}")
                ways.append(in_order(text, self._vocabulary.spelled("".join(parts))))
        return one_of(ways)

    def _token(self, expression: str) -> Fragment:
        name = self._name("text").upper()
        return Fragment(name, (f"{name}: {expression}",))

    def _then(self, fragment: Fragment, ends: Ends) -> Fragment:
        if not ends:
            return fragment
        return in_order(fragment, one_of([Fragment(self._vocabulary.spelled(end)) for end in ends]))

    def _formats(self, value: dict[str, Any], name: str) -> list[Any]:
        items = value.get(name)
        if not isinstance(items, list) or not items or not all(isinstance(x, dict) for x in items):
            raise self._wrong(f"{name} must be a list of objects, not empty")
        return items

    def _texts(self, value: dict[str, Any], name: str) -> tuple[str, ...]:
        texts = value.get(name) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self._wrong(f"{name} must be a list of texts")
        return tuple(dict.fromkeys(texts))

    def _text(self, value: Any, name: str) -> str:
        text = value.get(name) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise self._wrong(f"{name} must be a text")
        return text

    def _name(self, kind: str) -> str:
        self._num_rules += 1
        return f"{kind}_{self._num_rules}"

    def _wrong(self, message: str) -> Refused:
        return _bad(self._whole, f"this structural tag is not valid: {message}")
