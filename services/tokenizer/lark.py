"""Writes grammars as llguidance reads them: Lark's syntax with JSON schemas and token ids inside.

It knows the syntax and the model's vocabulary, but nothing about chats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

FREE_TEXT = "<[*]>*"  # any tokens, special ones too
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Write a text as a regular expression to stand between slashes."""
    escaped = "".join(f"\\{char}" if char in "/[]().*+?|\\{}^$" else char for char in text)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")


def repeated(fragment: Fragment, times: str = "*") -> Fragment:
    return replace(fragment, expression=f"({fragment.expression}){times}")


def optional(fragment: Fragment) -> Fragment:
    return repeated(fragment, "?")


def one_of(fragments: Sequence[Fragment]) -> Fragment:
    if len(fragments) == 1:
        return fragments[0]
    return _joined(fragments, "(" + " | ".join(part.expression for part in fragments) + ")")


def in_order(*parts: Fragment | str) -> Fragment:
    """Write parts one behind the other; a `str` is an expression without rules of its own."""
    fragments = [Fragment(part) if isinstance(part, str) else part for part in parts]
    return _joined(fragments, " ".join(part.expression for part in fragments if part.expression))


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


class Vocabulary:
    """One tokenizer's ids, as expressions of a grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        # llguidance takes an added token in angle brackets for special, whatever the folder says.
        self._special = frozenset(
            token_id
            for text, token_id in self._added.items()
            if added[token_id].special or (text.startswith("<") and text.endswith(">"))
        )
        markers = [text for text, token_id in self._added.items() if token_id in self._special]
        markers.sort(key=len, reverse=True)  # the longer of two at one place
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        if added:
            self.size = max(self.size, 1 + max(added))  # where ids between are not used
        # Writing ranges over a vocabulary of 128,000 takes 20 ms; there are as many as formats.
        self._written = lru_cache(maxsize=16)(self._write)

    def token_of(self, text: str) -> int | None:
        """Return the id of the added token that spells this text, special or not."""
        return self._added.get(text)

    def is_special(self, text: str) -> bool:
        """Whether a special token spells this text, which no text in a grammar matches."""
        return self._added.get(text) in self._special

    def marker(self, text: str) -> str:
        """Write a marker: as its id where it is a special token, otherwise as text."""
        return f"<[{self._added[text]}]>" if self.is_special(text) else literal(text)

    def parts(self, text: str) -> list[str]:
        """Cut a text into special tokens and the texts between them."""
        parts = self._markers.split(text) if self._markers is not None else [text]
        return [part for part in parts if part]

    def spelled(self, text: str) -> str:
        """Write a text with markers in it."""
        return " ".join(map(self.marker, self.parts(text))) or literal("")

    def ordinary(self, without: int | None = None, lacking: str = "") -> str:
        """Write "any token of plain text" except an id and the tokens that hold a character."""
        return self._written(self._special, without, lacking)

    def any(self, without: int) -> str:
        """Write "any token but this one"."""
        return self._written(frozenset(), without, "")

    def bad_word_sequences(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each bad word, at the start of a text and behind a blank."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = word.strip()
            alone, within = self._ids(plain), self._ids(f" {plain}")
            if not plain or not alone:
                continue
            sequences[alone] = None
            if within[-len(alone) :] != alone:  # otherwise it ends in what is banned already
                sequences[within] = None
        return tuple(sequences)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _write(self, excluded: frozenset[int], without: int | None, lacking: str) -> str:
        if without is not None:
            excluded |= {without}
        if lacking:
            excluded |= self._holding(lacking)
        return ids_expression(token for token in range(self.size) if token not in excluded)

    def _holding(self, character: str) -> frozenset[int]:
        """Find the tokens that hold a character or its first byte, which may be a token of its own.

        Byte-level vocabularies write a byte from 0xA1 on as the character of that number.
        """
        first = character.encode()[0]
        signs = {character, chr(first)}
        held = set()
        for text, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            byte = _BYTE_TOKEN.fullmatch(text)
            if int(byte[1], 16) == first if byte else any(sign in text for sign in signs):
                held.add(token_id)
        return frozenset(held)


def ids_expression(token_ids: Iterable[int]) -> str:
    """Write "one of these tokens" in ranges: `<[3,7-9]>`."""
    ranges: list[list[int]] = []
    for token_id in token_ids:
        if ranges and ranges[-1][1] + 1 == token_id:
            ranges[-1][1] = token_id
        else:
            ranges.append([token_id, token_id])
    spans = (f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)
    return f"<[{','.join(spans)}]>"
