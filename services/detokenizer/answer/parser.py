"""One answer's parsers, one behind the other: reasoning first, then calls in the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from common.chat_formats import ReasoningMarkers
from common.messages.text import Part
from services.detokenizer.answer.reader import Reading, TextReader, ignore

Kind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]

SPACE = " \t\r\n"
_NEWLINES = re.compile(r"\n+")
NO_PARTS = (Part("content", ""),)


class ReasoningParser(Protocol):
    """Tells reasoning from content; `inside` says that the text is reasoning now."""

    inside: bool

    def parse(
        self,
        reader: TextReader,
        reasoning: Callable[[str], object],
        content: Callable[[str], object],
    ) -> Reading[None]:
        """Read the reasoning; what is left when it comes to its end is content."""
        ...


class TaggedReasoning:
    """Finds reasoning between two markers, `<think>` and the like, at the beginning of an answer.

    Markers further on are content: an answer may speak of them. Newlines next to the markers are
    left out. `is_open` says that the prompt has the first marker already; a model may write it
    again.
    """

    def __init__(self, markers: ReasoningMarkers, is_open: bool) -> None:
        self.inside = is_open
        self._begin = markers.begin
        self._end = markers.end
        first = re.escape(markers.end[0])
        self._text = re.compile(rf"[^\n{first}]+")

    def parse(
        self,
        reader: TextReader,
        reasoning: Callable[[str], object],
        content: Callable[[str], object],
    ) -> Reading[None]:
        reader.keep()
        yield from reader.skip_space()
        found = yield from reader.match(self._begin)
        before = reader.drop()
        if not found and not self.inside:
            content(before)
            return
        self.inside = True
        if not found:
            before = before.lstrip("\n")
            reasoning(before)
        yield from self._reason(reader, reasoning, begun=bool(before) and not found)
        self.inside = False
        yield from reader.run(_NEWLINES, ignore)

    def _reason(
        self, reader: TextReader, reasoning: Callable[[str], object], begun: bool
    ) -> Reading[None]:
        """Read up to the last marker; newlines wait for what follows them."""
        newlines: list[str] = []
        while True:
            character = yield from reader.run(_NEWLINES, newlines.append)
            if character and (yield from reader.match(self._end)):
                return
            if not begun:
                newlines.clear()
            if newlines:
                reasoning("".join(newlines))
                newlines.clear()
            if not character:
                return
            begun = True
            reasoning(reader.one())
            yield from reader.run(self._text, reasoning)


class ToolParser(Protocol):
    """Finds the calls in the text of one answer.

    It loses nothing: text that looks like a call and turns out to be none comes out as content, as
    it is; of a call that breaks off or is not well formed what was sent is passed on as arguments.
    It never looks back, so its cost is linear in the text.
    """

    def parse(self, reader: TextReader, out: PartSink) -> Reading[None]:
        """Read the text to its end and hand on what is in it."""
        ...


class AnswerParser:
    """Makes parts of an answer's text, as it comes; either parser may be missing.

    The parts of a text, joined, do not depend on how the text was cut.
    """

    __slots__ = ("_content", "_reasoning", "_reasoning_stage", "_sink", "_tool_stage")

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        call_id: Callable[[int], str],
    ) -> None:
        sink = PartSink(call_id)
        self._sink = sink
        self._reasoning = reasoning
        self._tool_stage: _Stage | None = None
        self._reasoning_stage: _Stage | None = None
        self._content: Callable[[str], object] = sink.plain
        if tools is not None:
            reader = TextReader()
            self._tool_stage = _Stage(reader, tools.parse(reader, sink))
            self._content = self._tool_stage.push
        if reasoning is not None:
            reader = TextReader()
            reading = reasoning.parse(reader, sink.reasoning, self._content)
            self._reasoning_stage = _Stage(reader, reading)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def may_reason(self) -> bool:
        return self._reasoning_stage is not None

    @property
    def reasons(self) -> bool:
        """Whether the text taken last was reasoning that goes on."""
        return self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> tuple[Part, ...]:
        """Take more text and return its parts: at least one, if only an empty one."""
        stage = self._reasoning_stage
        if stage is None:
            self._content(text)
        elif stage.push(text):
            self._reasoning_stage = None
            self._content(stage.rest())
        return self._sink.take()

    def finish(self) -> tuple[Part, ...]:
        """End the text; return what was held back, likewise."""
        if self._reasoning_stage is not None:
            self._content(self._reasoning_stage.finish())
            self._reasoning_stage = None
        if self._tool_stage is not None:
            self._tool_stage.finish()
        self._sink.finish()
        return self._sink.take()


class _Stage:
    """A reading, and the text that it reads."""

    __slots__ = ("_reader", "_reading")

    def __init__(self, reader: TextReader, reading: Reading[None]) -> None:
        self._reader = reader
        self._reading = reading

    def push(self, text: str) -> bool:
        """Take more text; return whether the reading has come to its end."""
        self._reader.feed(text)
        return next(self._reading, True) is True

    def rest(self) -> str:
        return self._reader.rest()

    def finish(self) -> str:
        """Say that no text follows; return what the reading has left over."""
        self._reader.ended = True
        next(self._reading, None)
        return self._reader.rest()


class PartSink:
    """Joins pieces of one kind that follow each other, and numbers the calls.

    White space around calls is no content: what stands before one is held back, what stands after
    one is left out. It comes out only where content goes on, to part it from the content before.
    """

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

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call, which gets an id if the model gave it none."""
        if not self._has_content:
            self._held = []
        self._parts_content = self._has_content and not self._held
        self._after_call = True
        self._join()
        call_id = call_id or self._call_id(self.num_calls)
        self._parts.append(Part("call", name, self.num_calls, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
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
