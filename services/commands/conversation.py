"""A conversation with a model: its messages, and its answers on the screen while they stream."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from services.commands.server import Target

DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Screen:
    """Shows an answer: on a terminal with its reasoning, dimmed, and in a pipe its text alone."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._part = ""

    def show(self, part: Literal["reasoning", "text", "call", "arguments"], text: str) -> None:
        if part == "reasoning" and not self._is_terminal:
            return
        if part != "arguments":
            self._enter(part)
        if part == "call":
            text = f"{BOLD}calls {text}{PLAIN} " if self._is_terminal else f"calls {text} "
        self._write(text)

    def end(self, note: str = "") -> None:
        """End the answer, perhaps with a remark."""
        self._enter("")
        if note:
            self.remark(note)
        if self._is_terminal:
            self._write("\n")

    def remark(self, text: str) -> None:
        """Show a line of our own, on a terminal only."""
        if self._is_terminal:
            self._write(f"{DIM}{text}{PLAIN}\n")

    def _enter(self, part: str) -> None:
        """Begin another part of the answer on a new line."""
        if part != self._part or part == "call":
            if self._is_terminal and self._part == "reasoning":
                self._write(PLAIN)
            if self._part:
                self._write("\n" if self._part != "reasoning" else "\n\n")
            if self._is_terminal and part == "reasoning":
                self._write(DIM)
        self._part = part

    @staticmethod
    def _write(text: str) -> None:
        print(text, end="", flush=True)


@dataclass(slots=True)
class ChatAnswer:
    """An answer so far; `calls` are in the API's form."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    first_s: float = 0.0  # until the first event
    whole_s: float = 0.0

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": self.calls} if self.calls else message


class ChatSession:
    """The messages so far; `settings` are fields of every request."""

    def __init__(
        self,
        target: Target,
        settings: dict[str, Any],
        system: str = "",
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        self.target = target
        self.system = system
        self.messages: list[dict[str, Any]] = []
        self._settings = settings
        self._tools = tools or []

    def ask(self, screen: Screen, *messages: dict[str, Any]) -> ChatAnswer:
        """Add messages and the model's answer; if that raises ServerError, nothing is added."""
        answer = ChatAnswer()
        began_s = time.monotonic()
        try:
            with contextlib.closing(self._events([*self.messages, *messages])) as events:
                for event in events:
                    answer.first_s = answer.first_s or time.monotonic() - began_s
                    _take(event, answer, screen)
        except KeyboardInterrupt:  # the text so far is kept; calls may be cut off
            answer.finish_reason = "interrupted"
            answer.calls.clear()
        answer.whole_s = time.monotonic() - began_s
        self.messages += [*messages, answer.message]
        return answer

    def _events(self, messages: list[dict[str, Any]]) -> Generator[dict[str, Any], None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.target.model,
            "messages": [*system, *messages],
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        if self._tools:
            body["tools"] = self._tools
        yield from self.target.api.events("/v1/chat/completions", body)


def _take(event: dict[str, Any], answer: ChatAnswer, screen: Screen) -> None:
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            screen.show("reasoning", reasoning)
        if text := delta.get("content"):
            answer.text += text
            screen.show("text", text)
        for piece in delta.get("tool_calls") or []:
            _take_call(piece, answer, screen)


def _take_call(piece: dict[str, Any], answer: ChatAnswer, screen: Screen) -> None:
    function = piece.get("function") or {}
    if piece.get("index", 0) >= len(answer.calls):
        name = str(function.get("name") or "")
        call = {"name": name, "arguments": ""}
        answer.calls.append({"id": piece.get("id"), "type": "function", "function": call})
        screen.show("call", name)
    arguments = function.get("arguments") or ""
    answer.calls[-1]["function"]["arguments"] += arguments
    screen.show("arguments", arguments)


def read_tools(path: str) -> list[dict[str, Any]]:
    """Read tools from a JSON file, with or without the API's wrapping, or raise ValueError."""
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    tools = content if isinstance(content, list) else [content]
    if not all(isinstance(tool, dict) and ("function" in tool or "name" in tool) for tool in tools):
        raise ValueError("it should hold a list of tools, each an object with a name")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
