"""The output items of a response, and the events of the one that a stream is writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from common.messages.text import TokenLogprob
from services.router.answer import ToolCall
from services.router.openai.logprobs import chat_logprobs
from services.router.responses.custom_input import CustomInput
from services.router.responses.tools import ToolName
from services.router.sse import json_bytes, json_string

# The text that grows in an item of each kind: the event's name and the field of its end.
_GROWING: Final = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}


def message_item(item_id: str, text: str, logprobs: list[Any], status: str) -> dict[str, Any]:
    """Build a message of the assistant."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text, logprobs)],
    }


def reasoning_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """Build an item of reasoning, which is never summarized here."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def call_item(item_id: str, call: ToolCall, tool: ToolName, status: str) -> dict[str, Any]:
    """Build the call of a tool; the `arguments` of a custom tool's are its input by now."""
    kind, field = (
        ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
    )
    item = {
        "id": item_id,
        "type": kind,
        "status": status,
        "call_id": call.id,
        "name": tool.name,
        field: call.arguments,
    }
    return {**item, "namespace": tool.namespace} if tool.namespace else item


def text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    """Build the one part that a message's content has."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def token_logprobs(tokens: Iterable[TokenLogprob]) -> list[Any]:
    """Build the logprobs of a part."""
    logprobs: list[Any] = chat_logprobs(tokens)["content"]
    return logprobs


class EventCounter:
    """Renders events with their numbers, which count from 0 in every stream."""

    __slots__ = ("next_number",)

    def __init__(self) -> None:
        self.next_number = 0

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Render one event."""
        body = json_bytes({"type": kind, "sequence_number": self.take(), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def take(self) -> int:
        """Return the number of the next event."""
        number = self.next_number
        self.next_number += 1
        return number


class OpenCall(NamedTuple):
    """A call that is being written: its id, and what is called."""

    id: str
    tool: ToolName


class OpenItem:
    """The output item that a stream is writing: what it has so far, and its events."""

    __slots__ = (
        "_before",
        "_call",
        "_counter",
        "_id",
        "_index",
        "_input",
        "_logprobs",
        "_texts",
        "kind",
    )

    def __init__(
        self, counter: EventCounter, kind: str, item_id: str, index: int, call: OpenCall | None
    ) -> None:
        """Take the item's place in the output, and of a call what is called."""
        self.kind = kind
        self._counter = counter
        self._id = item_id
        self._index = index
        self._call = call
        self._input = CustomInput() if kind == "custom_tool_call" else None
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        name = f"{_GROWING[kind][0]}.delta"
        head = json_bytes({"type": name, **self._place(), "delta": ""}).removesuffix(b'""}')
        self._before = b"event: %b\ndata: %b" % (name.encode(), head)

    def opening(self) -> Iterator[bytes]:
        """Render what comes before its text."""
        item = self.item("in_progress")
        if "content" in item:
            item["content"] = []
        yield self._counter.event(
            "response.output_item.added", {"output_index": self._index, "item": item}
        )
        if part := self._part("", []):
            yield self._counter.event(
                "response.content_part.added", {**self._place(), "part": part}
            )

    def text(self, text: str, tokens: Iterable[TokenLogprob] = ()) -> bytes:
        """Take and render more of its text, with the tokens of it where they were asked for."""
        if self._input is not None:
            text = self._input.push(text)
            if not text:
                return b""
        self._texts.append(text)
        more = b""
        if self.kind == "message":
            more = b',"logprobs":%b' % (json_bytes(token_logprobs(tokens)) if tokens else b"[]")
        return b'%b%b%b,"sequence_number":%d}\n\n' % (
            self._before,
            json_string(text),
            more,
            self._counter.take(),
        )

    @property
    def said(self) -> str:
        """Its text so far."""
        return "".join(self._texts)

    def score(self, tokens: Iterable[TokenLogprob]) -> None:
        """Take the tokens that all of its text was made of."""
        self._logprobs = token_logprobs(tokens)

    def rest(self) -> bytes:
        """Render what was held back of its text, of which no more comes."""
        reader, self._input = self._input, None
        rest = "" if reader is None else reader.finish()
        return self.text(rest) if rest else b""

    def closing(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Render its end, as the `item` that it has become."""
        name, field = _GROWING[self.kind]
        done: dict[str, Any] = {**self._place(), field: self.said}
        if self.kind == "message":
            done["logprobs"] = self._logprobs
        if self.kind == "function_call" and self._call is not None:
            done["name"] = self._call.tool.name
        yield self._counter.event(f"{name}.done", done)
        if part := self._part(done[field], self._logprobs):
            yield self._counter.event("response.content_part.done", {**self._place(), "part": part})
        yield self._counter.event(
            "response.output_item.done", {"output_index": self._index, "item": item}
        )

    def item(self, status: str) -> dict[str, Any]:
        """Build the item with what it has so far."""
        text = self.said
        if self._call is not None:
            call = ToolCall(self._call.id, self._call.tool.name, text)
            return call_item(self._id, call, self._call.tool, status)
        if self.kind == "reasoning":
            return reasoning_item(self._id, text, status)
        return message_item(self._id, text, self._logprobs, status)

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id, "output_index": self._index}
        return place if self._call is not None else {**place, "content_index": 0}

    def _part(self, text: str, logprobs: list[Any]) -> dict[str, Any] | None:
        if self._call is not None:
            return None
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return text_part(text, logprobs)
