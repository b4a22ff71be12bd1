"""Joins the pieces of a parsed answer into `Part`s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from common.messages.text import Part

Kind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]

SPACE = " \t\r\n"
NO_PARTS = (Part("content", ""),)


class PartSink:
    """Joins pieces of one kind that follow each other, and numbers the calls.

    White space around calls is no content: what stands before one is held back, what stands after
    one is left out. It comes out only where content goes on, to part it from the content before.
    """

    __slots__ = (
        "_after_call",
        "_call_id",
        "_has_content",
        "_held",
        "_kind",
        "_parts",
        "_parts_content",
        "_pieces",
        "num_calls",
    )

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.num_calls = 0
        self._call_id = call_id
        self._parts: list[Part] = []
        self._kind: Kind = "content"
        self._pieces: list[str] = []
        self._held: list[str] = []  # white space at the end of the content
        self._has_content = False
        self._after_call = False  # no content since the last call
        self._parts_content = False  # nor white space before it

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def plain(self, text: str) -> None:
        """Add content of an answer in which no calls are looked for."""
        self._add("content", text)

    def content(self, text: str) -> None:
        """Add content between calls."""
        if self._after_call:
            begun = text.lstrip(SPACE)
            if self._parts_content:
                self._held.append(text[: len(text) - len(begun)])
            if not begun:
                return
            text = begun
            self._after_call = False
        shown = text.rstrip(SPACE)
        if shown:
            if self._held:
                self._add("content", "".join(self._held))
                self._held = []
            self._add("content", shown)
            self._has_content = True
        if len(shown) < len(text):
            self._held.append(text[len(shown) :])

    def call(self, name: str) -> None:
        """Begin a call."""
        if not self._has_content:
            self._held = []
        self._parts_content = self._has_content and not self._held
        self._after_call = True
        self._join()
        self._parts.append(Part("call", name, self.num_calls, self._call_id(self.num_calls)))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call begun last."""
        self._add("arguments", text)

    def finish(self) -> None:
        """End the answer: no call follows the white space that was held back."""
        if self._held and not self._after_call:
            self._add("content", "".join(self._held))
        self._held = []

    def take(self) -> tuple[Part, ...]:
        """Return the parts since the last time, at least an empty one."""
        self._join()
        if not self._parts:
            return NO_PARTS
        parts = tuple(self._parts)
        self._parts.clear()
        return parts

    def _add(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._join()
            self._kind = kind
        if text:
            self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            index = self.num_calls - 1 if self._kind == "arguments" else 0
            self._parts.append(Part(self._kind, text, index))
            self._pieces = []
