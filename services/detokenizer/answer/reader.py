"""Streamed text, for parsers that are written as if all of it were there."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Reading: TypeAlias = Generator[None, None, T]
"""A parser, or a part of one: it yields where it has to wait for more text."""

SPACE = re.compile(r"[ \t\r\n]+")


def ignore(text: str) -> None:
    """Let a piece of text go."""


class TextReader:
    """Reads a text in pieces, each as soon as it is certain.

    The output for a text does not depend on how the text was cut: a reading takes all there is
    before it waits, and waits only for the possible rest of a word. The unread text is shorter
    than a word, so the cost is linear in the text.
    """

    __slots__ = ("_at", "_kept", "_keeps", "_text", "ended")

    def __init__(self) -> None:
        self.ended = False  # no text follows what is here
        self._text = ""
        self._at = 0
        self._kept: list[str] = []
        self._keeps = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def rest(self) -> str:
        return self._take(len(self._text))

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; none at the end of the text."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def one(self) -> str:
        """Read the next character, which must be there."""
        return self._take(self._at + 1)

    def run(self, characters: re.Pattern[str], emit: Callable[[str], object]) -> Reading[str]:
        """Read while a pattern matches, which is a set of characters repeated.

        Returns the character after the run, which is not read yet; none at the end of the text.
        """
        while True:
            found = characters.match(self._text, self._at)
            if found is not None:
                emit(self._take(found.end()))
            if self._at < len(self._text):
                return self._text[self._at]
            if self.ended:
                return ""
            yield

    def skip_space(self) -> Reading[str]:
        """Read white space; return the character after it, which is not read yet."""
        return self.run(SPACE, ignore)

    def match(self, *words: str) -> Reading[str]:
        """Read the word that comes next; return none, and read nothing, if none of these does.

        No word may begin another.
        """
        word = yield from self.sees(*words)
        if word:
            self._take(self._at + len(word))
        return word

    def sees(self, *words: str) -> Reading[str]:
        """Return the word that comes next without reading it; none if none of these does."""
        while True:
            text, at = self._text, self._at
            for word in words:
                if text.startswith(word, at):
                    return word
            # Only an unfinished word is worth the wait; the text here is then shorter than it.
            unfinished = any(
                len(text) - at < len(word) and word.startswith(text[at:]) for word in words
            )
            if self.ended or not unfinished:
                return ""
            yield

    def keep(self, before: str = "") -> None:
        """Keep what is read from here on, behind what was read `before`."""
        self._kept = [before]
        self._keeps = True

    def drop(self) -> str:
        """Return what was kept, and keep no more."""
        kept = "".join(self._kept)
        self._kept = []
        self._keeps = False
        return kept

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._keeps:
            self._kept.append(text)
        return text
