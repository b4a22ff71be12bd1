"""SentencePiece-like vocabularies: pieces of text, and a token for each byte as a fallback."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import TypeAlias

from services.detokenizer.decoding.protocol import num_completing, unfinished

Piece: TypeAlias = str | int
"""A piece of text, or the value of a byte token."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteFallbackDecoding:
    """A table of each token's piece.

    `replacements` are (from, to) pairs applied to every token, usually the lower one eighth block
    to a space. `stripped` is how many leading spaces a text loses at its beginning.
    """

    def __init__(
        self,
        tokens: Mapping[int, str],
        special_ids: Set[int],
        replacements: tuple[tuple[str, str], ...],
        stripped: int,
        has_byte_tokens: bool,
    ) -> None:
        size = max(tokens, default=-1) + 1
        table: list[Piece] = [""] * size
        for token_id, token in tokens.items():
            text = token
            for old, new in replacements:
                text = text.replace(old, new)
            byte = _BYTE_TOKEN.fullmatch(text) if has_byte_tokens else None
            table[token_id] = int(byte[1], 16) if byte else text
        self._all = table
        self._special_ids = frozenset(special_ids)
        self._stripped = stripped

    def stream(
        self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> ByteFallbackStream:
        skipped = frozenset[int]()
        if skip_special_tokens:
            skipped = self._special_ids - shown if shown else self._special_ids
        return ByteFallbackStream(self._all, skipped, self._stripped)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._all):
            return b""
        piece = self._all[token_id]
        return bytes([piece]) if isinstance(piece, int) else piece.encode()


class ByteFallbackStream:
    """One stream of pieces; a run of byte tokens is text once the run has ended.

    Only then is it known what the whole run decodes to: `tokenizers` makes a replacement character
    of every byte of a run that is not valid UTF-8 as a whole, of bytes already shown too.

    `_begun` is the beginning of a character at the end of the prompt, which the first run may
    complete.
    """

    __slots__ = ("_begun", "_run", "_skipped", "_strip", "_table")

    def __init__(self, table: list[Piece], skipped: frozenset[int], stripped: int) -> None:
        self._table = table
        self._skipped = skipped
        self._strip = stripped
        self._run = bytearray()
        self._begun = b""

    def follow(self, prompt_ids: Iterable[int]) -> str:
        """Start behind a prompt; its last run ends with it, but for an unfinished character."""
        text = self.push(prompt_ids)
        begun = unfinished(bytes(self._run))
        del self._run[len(self._run) - len(begun) :]
        text += self.flush()
        if begun:
            self._begun, self._strip = begun, 0  # the text has begun with it
        return text

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids and return the text up to the last run of bytes that goes on."""
        table = self._table
        size = len(table)
        parts: list[str] = []
        for token_id in ids:
            if not 0 <= token_id < size or token_id in self._skipped:
                continue  # left out before the decoder sees it: it does not end a run
            piece = table[token_id]
            if isinstance(piece, int):
                self._run.append(piece)
            else:
                if self._run or self._begun:
                    parts.append(self._end_run())
                parts.append(piece)
        return self._without_leading_space("".join(parts))

    def flush(self) -> str:
        return self._without_leading_space(self._end_run())

    def _end_run(self) -> str:
        run, begun = bytes(self._run), self._begun
        self._run.clear()
        self._begun = b""
        count = num_completing(begun, run) if begun else 0
        first = (begun + run[:count]).decode() if count else ""
        rest = run[count:] if count else run
        try:
            return first + rest.decode()
        except UnicodeDecodeError:
            return first + "\N{REPLACEMENT CHARACTER}" * len(rest)

    def _without_leading_space(self, text: str) -> str:
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
