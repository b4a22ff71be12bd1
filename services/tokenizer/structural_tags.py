"""The grammar of a structural tag: free text in which tags begin constrained parts.

Runs in a process of the pool, within its limits: formats come from clients. They are xgrammar's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeAlias

from common.messages.tokenize import Structure, StructureKind
from services.tokenizer.jobs import Refused, refused
from services.tokenizer.lark import Fragment, escaped, in_order, one_of, optional
from services.tokenizer.structures import structure_grammar
from services.tokenizer.vocabulary import Vocabulary

MAX_REPEATS = 1000

# The texts that end a format, one of which belongs to it. Without any, the format is the last of
# the answer; None means that more follows without such a mark.
Ends: TypeAlias = tuple[str, ...] | None

_TEXT = r"(.|\n)*"
_FREE = Fragment("FREE_TEXT?", (f"FREE_TEXT: /{_TEXT}/",))


def tag_grammar(structure: Structure, vocabulary: Vocabulary) -> Fragment:
    """Return the grammar of a structural tag; Refused for an invalid format."""
    try:
        value = json.loads(structure.text)
    except ValueError as error:
        raise _bad(structure.field, f"a structural tag must be valid JSON: {error}") from error
    written = _Writer(structure, vocabulary).write(value, ())
    return Fragment(written.expression, tuple(dict.fromkeys(written.rules)), written.grammars)


class _Writer:
    """Writes formats, each with the ends behind it; the names of its rules count up."""

    def __init__(self, structure: Structure, vocabulary: Vocabulary) -> None:
        self._whole = structure
        self._vocabulary = vocabulary
        self._num_rules = 0

    def write(self, value: Any, ends: Ends) -> Fragment:
        """Return the grammar of a format and one of its ends."""
        if not isinstance(value, dict):
            raise self._wrong("a format must be an object")
        match value.get("type"):
            case "any_text":
                return self._any_text(value, ends)
            case "triggered_tags":
                return self._triggered(value, ends)
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
        match value.get("type"):
            case "const_string":
                return self._spelled(self._text(value, "value"))
            case "json_schema":
                if value.get("style", "json") != "json":
                    raise self._wrong("the style of a json_schema can only be json")
                schema = value.get("json_schema")
                if isinstance(schema, str):  # of the older form
                    return self._structure("json_schema", schema)
                return self._structure("json_schema", json.dumps(schema))
            case "regex":
                return self._structure("regex", self._text(value, "pattern"))
            case "grammar":
                return self._structure("grammar", self._text(value, "grammar"))
            case other:
                raise self._wrong(f"there is no format of the type {json.dumps(other)[:40]} here")

    def _structure(self, kind: StructureKind, text: str) -> Fragment:
        return structure_grammar(replace(self._whole, kind=kind, text=text), self._name(kind))

    def _any_text(self, value: dict[str, Any], ends: Ends) -> Fragment:
        if ends is None:
            raise self._wrong("any_text can only be the last part of a tag or of the answer")
        return self._text_until(ends, self._texts(value, "excludes"))

    def _tag(self, value: Any, ends: Ends = None) -> Fragment:
        """Write a whole tag."""
        return in_order(self._spelled(self._text(value, "begin")), self._behind_begin(value, ends))

    def _behind_begin(self, tag: dict[str, Any], ends: Ends = None) -> Fragment:
        end = tag.get("end")
        given = end if isinstance(end, list) else [end]
        if not given or not all(isinstance(text, str) for text in given):
            raise self._wrong("the end of a tag must be a text or several")
        own = tuple(text for text in given if text)
        if not own:
            return self.write(tag.get("content"), ends)
        return self._then(self.write(tag.get("content"), own), ends)

    def _triggered(self, value: dict[str, Any], ends: Ends) -> Fragment:
        """Write free text in which each trigger begins one of its tags."""
        if ends is None:
            raise self._wrong("triggered_tags can only be the last part of a tag or of the answer")
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
            rest = in_order(self._spelled(begin[len(trigger) :]), self._behind_begin(tag))
            rests.setdefault(trigger, []).append(rest)
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
            return in_order(_times(begun), tail)
        first = one_of([self._tag(tag) for tag in tags])  # nothing comes before it, as in xgrammar
        return self._then(first, ends) if once else in_order(first, _times(begun), tail)

    def _separated(self, value: dict[str, Any]) -> Fragment:
        tags = one_of([self._tag(tag) for tag in self._formats(value, "tags")])
        separator = self._spelled(self._text(value, "separator"))
        if not value.get("stop_after_first"):
            tags = in_order(tags, _times(in_order(separator, tags)))
        return tags if value.get("at_least_one") else optional(tags)

    def _repeated(self, value: dict[str, Any]) -> Fragment:
        item = self.write(value.get("content"), None)
        match value["type"]:
            case "optional":
                return optional(item)
            case "star":
                return _times(item)
            case "plus":
                return in_order(item, _times(item))
        least, most = value.get("min", 0), value.get("max", MAX_REPEATS)
        if most == -1:
            most = MAX_REPEATS
        if type(least) is not int or type(most) is not int or not 0 <= least <= most <= MAX_REPEATS:
            raise self._wrong(f"min and max of a repeat must be 0 to {MAX_REPEATS}, in order")
        return _times(item, f"{{{least},{most}}}") if most else self._spelled("")

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
                ways.append(in_order(text, self._spelled("".join(parts))))
        return one_of(ways)

    def _token(self, expression: str) -> Fragment:
        name = self._name("text").upper()
        return Fragment(name, (f"{name}: {expression}",))

    def _then(self, fragment: Fragment, ends: Ends) -> Fragment:
        if not ends:
            return fragment
        return in_order(fragment, one_of([self._spelled(end) for end in ends]))

    def _spelled(self, text: str) -> Fragment:
        return Fragment(self._vocabulary.spelled(text))

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
        return _bad(self._whole.field, f"this structural tag is not valid: {message}")


def _times(fragment: Fragment, how_often: str = "*") -> Fragment:
    expression = f"({fragment.expression}){how_often}"
    return Fragment(expression, fragment.rules, fragment.grammars)


def _bad(field: str, message: str) -> Refused:
    return refused(message, "invalid_grammar", field)
