"""The vocabulary as grammars need it: which texts are one token, and which are special."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer

from services.tokenizer.lark import literal

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """One tokenizer's ids, as expressions of a grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = frozenset(
            token_id for token_id, token in added.items() if token.special or _is_tag(token.content)
        )
        markers = [text for text, token_id in self._added.items() if token_id in self._special]
        self._markers = _pattern(markers) if markers else None
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

    def _write(self, excluded: frozenset[int], without: int | None, lacking: str) -> str:
        if without is not None:
            excluded |= {without}
        if lacking:
            excluded |= self._scan(lacking)
        return ids_expression(token for token in range(self.size) if token not in excluded)

    def _scan(self, character: str) -> frozenset[int]:
        """Find the tokens that hold a character or its first byte, which may be a token of its own.

        Byte-level vocabularies write a byte from 0xA1 on as the character of that number.
        """
        first = character.encode()[0]
        signs = {character, chr(first)}
        held = set()
        for text, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            byte = _BYTE_TOKEN.fullmatch(text)
            if byte:
                if int(byte[1], 16) == first:
                    held.add(token_id)
            elif any(sign in text for sign in signs):
                held.add(token_id)
        return frozenset(held)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern whose split keeps these texts, the longer of two at one place."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


def _is_tag(text: str) -> bool:
    """Whether llguidance takes an added token for special regardless of the folder."""
    return text.startswith("<") and text.endswith(">")


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


def bad_word_sequences(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each of a client's bad words, at the start of a text and behind a blank."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = word.strip()
        alone = _ids(plain, tokenizer)
        within = _ids(f" {plain}", tokenizer)
        if not plain or not alone:
            continue
        sequences[alone] = None
        if within[-len(alone) :] != alone:  # otherwise it ends in what is banned already
            sequences[within] = None
    return tuple(sequences)


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
